"""Simulated links between real processes: a TCP proxy that delays bytes as the models of a link say.

    client ──▶ ListeningPort ──▶ Connection ┬─ Flow "to"   ──▶ upstream    bytes in · plan · bytes out, when due
                                            └─ Flow "from" ◀──
    LinkProxy   the whole of it: one listening port, all its connections, the condition they are under
    control     the same over HTTP (`control.py`) · on a timeline (`timeline.py`)

gRPC, MQTT, HTTP and TLS pass untouched: nothing here looks into the bytes. Everything happens on one event loop without
waiting in between, so a change of the condition is one step for every live connection: no connection sees half of it.

Bytes are conserved and stay in order unless a fault that destroys some was requested; each direction of each
connection keeps a ledger (`ledger.py`) and checks it, and what does not add up is an event of level error.

What a stream cannot show is not pretended: packets are not lost, reordered or corrupted here. Loss is what a TCP stream
makes of it, a stall. A connection that the proxy accepts is accepted by the kernel, before any delay.
"""
