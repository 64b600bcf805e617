"""Room gateway/core/history."""
