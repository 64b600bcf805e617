"""How a pool answers: its models behind the common pipeline, coalesced requests and the state of sequences.

`app.py` imports the host (`host.PoolHost`). Batches are formed in `scheduling` and `core/batching`, workers live in
`workers`, and the pipeline that a pool shares with an edge is `tidegate/serving`.
"""
