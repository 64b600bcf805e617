"""Cross-cutting concerns around the dispatcher, one layer a file: a function from a service to a service.

`gateway/app.py` puts the layers in order with `stack`. A layer enforces what `gateway/core` decides, and holds no
policy of its own.
"""
