"""OIP over gRPC: its protobuf codec, the service over a `ModelHost`, and the health and reflection services.

A process adds the servicers to a `grpc.aio` server. The codec and `message_bounds.py` are pure; link streams use them
as well. Listening on a port is `tidegate/servers`.
"""
