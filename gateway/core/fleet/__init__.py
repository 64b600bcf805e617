"""Room gateway/core/fleet."""
