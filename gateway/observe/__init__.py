"""Room gateway/observe."""
