"""Which batch and which model gets a device next, and where the workers are placed.

The batching policies import `next_candidate`, and the app imports `worker_places`. Which model's turn it is does not
belong here, since devices need it too (`tidegate/models/fair_share.py`), nor how one batch is composed: that is
`cloud_pool/core/batching`.
"""
