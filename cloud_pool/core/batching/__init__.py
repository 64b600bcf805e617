"""How requests become batches: queue order, padding and packing, the latency model, batching policies and their limits.

The scheduler imports `ModelInstance` (one model variant on this pool's device, with its `Batcher`), `QueueItem`, the
layouts that stack and split arrays, and the retry groups of `isolation.py`; the host imports `sequences.py` and
`dedup.py`. Which model instance may use the device next does not belong here: that is `cloud_pool/core/sharing`.
"""
