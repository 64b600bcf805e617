"""This room is about one gateway in several processes (`workers`): a parent, a keeper, and workers that serve callers.

The parent (`supervisor.py`) starts and restarts the others and owns what callers connect to; `channel.py` and
`messages.py` are how they talk, through it. `process_part.py` is what one of them knows of its part. The keeper accepts
the devices' streams and lends them to the workers (`dial_in_relay.py`, `relayed_links.py`), and answers operators for
all of them (`overview.py`). What each process holds, and why, is in docs/gateway-workers.md. Others import the rooms'
classes in `gateway/app.py` and `gateway/cli.py` only; without `workers` nothing of this runs.
"""
