"""Room simulator/scenarios."""
