"""Room simulator/baselines."""
