"""This room finds targets: each source reports the set of targets that are there now, and `Discovery` runs the sources.

Others import `Discovery`. How the sets of several sources become one is decided in
`gateway/core/fleet/found_targets.py`; connections to targets belong to `gateway/targets`.
"""
