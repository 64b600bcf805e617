"""The device beneath the agent: its sensors and accelerators, the memory of its processes, its workers' priority.

The app imports `Sensors`, `MemoryWatch`, `devices_here` and `worker_starter`. What the readings mean for admission does
not belong here: that is `edge_agent/core/device_conditions.py`.
"""
