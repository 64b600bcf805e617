"""A release's files are held together by checksums, a statement of their making, and signatures over that statement.

`make dist` (deploy/release/dist.py) writes them; `tidegate release sign` and `tidegate release verify` are for people.
"""
