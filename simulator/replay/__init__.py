"""Room simulator/replay."""
