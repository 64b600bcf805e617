"""Simulated links between real processes: a TCP proxy that does to bytes what `tidegate/netsim/links` says.

    client ──▶ Door ──▶ Connection ┬─ Flow "to"   ──▶ upstream      bytes in · plan · bytes out, when they are due
                                   └─ Flow "from" ◀──
    Link      the whole of it: one listening port, all its connections, the condition they are under
    Control   the same over HTTP (`control.py`) · from other threads (`host.py`) · on a timeline (`timeline.py`)

gRPC, MQTT, HTTP and TLS pass untouched: nothing here looks into the bytes. Everything happens on one event loop without
waiting in between, so a change of the condition is one step for every live connection: none is ever under half of it.

Bytes are conserved and stay in order unless somebody asked for a fault that destroys some; each direction of each
connection keeps a ledger (`ledger.py`) and checks it, and what does not add up is an event of level error.

What a stream cannot show is not pretended: packets are not lost, reordered or corrupted here. Loss is what a TCP stream
makes of it, a stall. A connection that the proxy accepts is accepted by the kernel, before any delay.
"""
