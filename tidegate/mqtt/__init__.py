"""Room tidegate/mqtt."""
