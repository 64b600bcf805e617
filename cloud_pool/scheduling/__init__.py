"""The scheduler of the pool: it queues requests, feeds batches to the workers and settles the callers' futures.

The host imports `PoolScheduler`, `PoolRequest` and `PoolResult`; the worker supervision attaches and detaches workers;
the metrics read `queues`, the device arbiter and the batch counts. Decisions without IO belong in `cloud_pool/core`,
and starting or watching worker processes belongs in `cloud_pool/workers`.
"""
