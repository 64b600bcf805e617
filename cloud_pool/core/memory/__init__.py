"""How many bytes a device holds, how many a batch may take, and what an out-of-memory failure changes.

The device arbiter imports `DeviceMemory` and the work caps; the app imports the check at start. Measuring memory
belongs in `tidegate/workers/memory_meter.py`, waiting and trying again in `cloud_pool/scheduling`.
"""
