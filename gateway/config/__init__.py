"""Room gateway/config."""
