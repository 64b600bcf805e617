"""Room gateway/core/versions."""
