"""Pure models of links: when do these bytes come out at the other end, if they go in now?

    Direction   a stack of stages for one direction, first in first out  (`direction.py`)
    stages      Delay · Rate · TraceRate · Stall · Outage      (`delay.py`, `rate.py`, `trace.py`, `loss.py`)
    Link        two directions that share what a radio shares           (`profile.py`)

They know no sockets and no clock: `now` and chance come from outside. So the same objects move frames in the simulated
fleet and bytes between real sockets.
"""
