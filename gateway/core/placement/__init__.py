"""This room chooses the target for an attempt: eligibility, predictions, chances, and the placers that use them.

Everything that places a request imports `Placement`, `Ask` and `Decision`; `gateway/placement_stack.py` stacks the
parts. What is known of targets is in `gateway/core/fleet`, and when to try again is decided in `gateway/core/request`.
"""
