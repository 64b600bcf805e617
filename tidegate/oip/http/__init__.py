"""Room tidegate/oip/http."""
