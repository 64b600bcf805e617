"""The agent's connections to its fleet: the MQTT session, the epoch on disk, and dialling of gateways.

The app imports `EdgeSync`, `EpochStore` and `GatewayDialler`. When to report or dial is decided in `edge_agent/core`;
answering requests on the streams belongs in `edge_agent/serving` and `tidegate/link`.
"""
