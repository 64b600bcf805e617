"""The rows of the fault matrix, each with its fault, how long it lasts, and what must hold.

Source: docs/design/faults.md, "Fault matrix".
A file a kind of fault: `links`, `devices`, `rumours`. Each has `TRIALS`; `tests/bench/faults.py` runs them.
"""
