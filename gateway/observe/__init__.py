"""Metrics, access log, spans, recordings and the need for replicas: what a gateway reports about its requests and
targets. `gateway/telemetry.py` puts these parts together. Nothing here changes a request, and the views that operators
ask for (console, explanations) are in `gateway/operate`.
"""
