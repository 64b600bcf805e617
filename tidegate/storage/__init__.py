"""Room tidegate/storage."""
