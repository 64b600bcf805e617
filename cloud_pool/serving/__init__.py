"""Room cloud_pool/serving."""
