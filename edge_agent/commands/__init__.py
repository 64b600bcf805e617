"""The operator's commands on a device: `tidegate edge doctor`, `join` and `store`.

`edge_agent/cli.py` registers them. They work beside a running agent and share no memory with it; judgements without IO
belong in `edge_agent/core/diagnosis.py`, and the agent's own work belongs in the other rooms.
"""
