"""What an edge and a pool have in common as servers of models: the pipeline from a checked call to its reply.

`target_host.TargetHost` is the `ModelHost` of both; each process brings its own `target_model.TargetModel`, which says
how a variant is chosen and how an answer is computed. Queues, workers, protocols and the gateway do not belong here.
"""
