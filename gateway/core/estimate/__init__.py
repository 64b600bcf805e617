"""Room gateway/core/estimate."""
