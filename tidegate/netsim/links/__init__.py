"""Pure models of links: they say at which instant bytes that enter now are all at the other end.

    Direction   a stack of stages for one direction, first in first out  (`direction.py`)
    stages      Delay · Rate · TraceRate · StallStage · OutageStage   (`delay.py`, `rate.py`, `trace.py`, `loss.py`)
    LinkModel   two directions that share what a radio shares           (`profile.py`)
    StreamPath  the same stages for a stream of bytes: gates, room, what is on its way   (`stream.py`)
    per connection  what a NAT forgets, and a break at an exact byte      (`nat.py`, `limit.py`)

The models know no sockets and no clock: `now` and chance come from outside. So the same objects move frames in the
simulated fleet (`simulator/simulation.py`) and bytes between real sockets (`tidegate/netsim/proxy`). `profiles/` has
links by name.
"""
