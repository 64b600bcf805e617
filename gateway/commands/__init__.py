"""The `tidegate` commands that operators use with a gateway: status, explain, top, record, log-level and keys.

`gateway/cli.py` imports the commands. They read a running gateway over its admin port like any other client, and the
key commands change files; none of them imports the serving path. What the admin port answers belongs to
`gateway/operate`.
"""
