"""Wire formats in front of the gateway; no decisions."""
