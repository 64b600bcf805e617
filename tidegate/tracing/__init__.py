"""Spans: their data type, their export to a collector, and the spans that a target makes of its own work.

All processes import the configuration section and the collector. Which requests are kept is decided by
`tidegate/trace_context.py` and by the gateway.
"""
