"""Room tidegate/tools."""
