"""Room simulator/world."""
