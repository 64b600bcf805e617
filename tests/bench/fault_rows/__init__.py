"""The rows of the fault matrix (routing.md B10), each with its fault, how long it lasts, and what must hold.

A file a kind of fault: `links`, `devices`, `rumours`. Each has `TRIALS`; `tests/bench/faults.py` runs them.
"""
