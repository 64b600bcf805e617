"""The link: frames on one long-lived bidirectional gRPC stream, for both of its ends.

`client.py` sends requests and `server.py` answers them, whichever side dialled; `session.py` runs the stream for either
of them, over the bytes of `frames.py`, `chunks.py` and `outbox.py`. The gateway imports `LinkClient` and `streams`; the
edge agent and the pool import `LinkService`. Dialling, redialling and the choice of a path do not belong here: they are
in `gateway/targets` and `edge_agent/fleet`.
"""
