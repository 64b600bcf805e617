"""Room gateway/operate."""
