"""Room gateway/serving."""
