"""Room cloud_pool/core/sharing."""
