"""Room tidegate/runtime."""
