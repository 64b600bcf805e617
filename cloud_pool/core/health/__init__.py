"""When a worker counts as degraded, hung, new or in reserve, and what the pool adapts about itself.

The health controller imports `WorkerHealth` and `AdaptiveControl`; the scheduler imports the watchdog's patience, slow
start and `Standby`. Reading a worker's memory and processor time, and restarting a worker, do not belong here: both
are in `cloud_pool/workers`.
"""
