"""Room cloud_pool/core/memory."""
