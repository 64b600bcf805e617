"""Whether a local caller's request is computed here, asked of a gateway, or refused; pure, as the folder above.

`edge_agent/help` acts on it: it holds the connections to gateways and carries requests and answers. What a gateway lets
a device ask for is the gateway's own (`gateway/core/access/asker.py`).
"""
