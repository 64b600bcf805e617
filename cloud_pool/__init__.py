"""The cloud pool serves torch models with dynamic batching on the devices of one machine.

`app.py` composes it: `serving` answers OIP gRPC and the gateway's link, `scheduling` queues and batches, `workers`
supervises the worker processes, and `core` holds the decisions without IO. Other packages start it by `cli.py` and
import nothing from it; code shared with the gateway or the edge agent belongs in `tidegate`.
"""
