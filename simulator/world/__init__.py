"""The simulated world around the workers: arrivals, weather and faults, links, gateways, and the count of outcomes.

`simulator/simulation.py` puts these parts together. What depends on the scenario and the seed alone is in `arrivals.py`
and `conditions.py`; `gateway.py` and `link_stream.py` drive the real decision cores over simulated links; `tally.py`
counts. Devices and pools are in `simulator/workers`, policies in `simulator/baselines`.
"""
