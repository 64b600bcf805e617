"""Fleets on virtual time: the real placement, queues and batcher over simulated links, devices and callers.

`simulation.py` runs one scenario under one policy and one seed, `sweep.py` runs many, and `cli.py` is `tidegate
simulate`. `scenarios` describes fleets, `world` and `workers` build them, `baselines` holds the policies to
compare with, `optimum` the bound above all of them, `replay` turns recorded traffic into a scenario, `report` makes
figures and plots, and `crowd` simulates only the MQTT side of many devices. Nothing that serves imports this package;
models of links belong in `tidegate/netsim`.
"""
