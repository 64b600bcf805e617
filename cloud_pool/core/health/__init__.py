"""Room cloud_pool/core/health."""
