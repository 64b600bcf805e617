"""Room gateway/core/placement."""
