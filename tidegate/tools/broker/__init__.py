"""Room tidegate/tools/broker."""
