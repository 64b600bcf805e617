"""The network emulator: models of links, and a TCP proxy that applies them to connections between real processes.

`links` holds the models, which know neither sockets nor a clock; the simulator uses them for its fleets. `proxy`
applies them to real bytes; it is `tidegate link`. Users' tests import `tidegate.testing`, which stands in front of
both. No process of a deployment imports this package; `tidegate up --link` starts it as a process of its own.
"""
