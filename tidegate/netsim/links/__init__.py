"""Pure models of links: when do these bytes come out at the other end, if they go in now?

    Direction   a stack of stages for one direction, first in first out  (`direction.py`)
    stages      Delay · Rate · TraceRate · Stall · Outage      (`delay.py`, `rate.py`, `trace.py`, `loss.py`)
    Link        two directions that share what a radio shares           (`profile.py`)
    Path        the same stages for a stream of bytes: gates, room, what is on its way   (`stream.py`)
    per connection  what a NAT forgets, and a break at an exact byte      (`nat.py`, `limit.py`)

They know no sockets and no clock: `now` and chance come from outside. So the same objects move frames in the simulated
fleet (`simulator/simulation.py`) and bytes between real sockets (`tidegate/netsim/proxy`). `profiles/` has links by
name.
"""
