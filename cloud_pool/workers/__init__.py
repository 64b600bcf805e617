"""Room cloud_pool/workers."""
