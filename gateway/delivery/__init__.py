"""Room gateway/delivery."""
