"""Room gateway/commands."""
