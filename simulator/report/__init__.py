"""Room simulator/report."""
