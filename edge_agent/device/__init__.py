"""The device beneath the agent: its sensors, the memory of its processes, and the priority of its workers.

The app imports `Sensors`, `MemoryWatch` and `worker_starter`. What the readings mean for admission does not belong
here: that is `edge_agent/core/device_conditions.py`.
"""
