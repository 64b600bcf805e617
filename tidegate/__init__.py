"""Tidegate: one inference endpoint in front of your devices and your GPU pool.

This package holds what the gateway, the edge agent and the pool share, and imports none of them. The modules at its top
are the ground floor: types, outcomes, the clock, the configuration loader and the command. Each folder is a room for
one subject; its `__init__` says what lives there. Code that only one process needs belongs to that process.
"""

__version__ = "0.1.0"
