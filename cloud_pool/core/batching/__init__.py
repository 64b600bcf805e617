"""Room cloud_pool/core/batching."""
