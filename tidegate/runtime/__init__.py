"""The life of a process: start and stop, logs, events to a parent, owned tasks, followed files, backoff, ports.

Every process and command imports it. It knows no protocol and no model; servers live in `tidegate/servers`.
"""
