"""The Open Inference Protocol v2: pure codecs, checks and limits, and servers over a `ModelHost`.

The three processes import the servers of `http/` and `grpc/` and the interface `ModelHost` (`host.py`); clients and
link streams import the codecs. What a host does with a call, credentials, and the sockets do not belong here: they are
in the processes, in `tidegate/security` and in `tidegate/servers`.
"""
