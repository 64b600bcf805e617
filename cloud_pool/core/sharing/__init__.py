"""Which batch and which model gets a device next, and where the workers are placed.

The batching policies import `next_candidate`, the device arbiter imports `FairShare`, and the app imports
`worker_places`. How one batch is composed does not belong here: that is `cloud_pool/core/batching`.
"""
