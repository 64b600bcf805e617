"""Spans: what they are, how they are sent to a collector, and those of a target's own."""
