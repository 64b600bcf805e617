"""Room cloud_pool/scheduling."""
