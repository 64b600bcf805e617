"""Room gateway/core/health."""
