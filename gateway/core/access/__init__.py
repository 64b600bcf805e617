"""Room gateway/core/access."""
