"""Recorded traffic as a scenario: what `tidegate record` wrote, on devices and links as they were measured.

Others import `replay` from `replay.py`. The format of recordings belongs to the gateway, which writes them
(`gateway/core/history/trace_format.py`).
"""
