"""The pool's decisions, free of IO, in four rooms: `batching`, `health`, `memory` and `sharing`.

The scheduler, the worker supervision and the app import from these rooms and perform what they decide. Nothing here
awaits, reads a clock, logs or holds a caller's future; such code belongs in `cloud_pool/scheduling` or
`cloud_pool/workers`.
"""
