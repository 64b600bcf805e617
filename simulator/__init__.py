"""Simulated links and fleets around the real decision cores."""
