"""Ingest of what devices stored while they were offline: each item is taken once, and deferred requests are computed.

The composition root imports `IngestService`; `gateway/fleet_sync` passes messages to `Ingest` and sends its receipts.
What a device stores, and when it forwards it, belongs to `edge_agent/offline`; the messages belong to `tidegate/fleet`.
"""
