"""Room gateway/core/request."""
