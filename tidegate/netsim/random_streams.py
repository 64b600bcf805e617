"""Streams of random numbers: one seed, and a stream of its own for every source of chance.

A policy that sends one frame more must not change when the next outage comes or how long the next request is; else
two policies that are compared see two different worlds. So each source of chance (a link's regime, a device's noise,
the arrivals) draws from its own stream, named by what it is for. Streams of different names or seeds are independent.
"""

from __future__ import annotations

from random import Random


def stream(seed: int, *names: object) -> Random:
    """The stream of this seed and these names; the same on every machine and in every run."""
    # A string is hashed by SHA-512 in `Random`, not by Python's salted `hash`.
    return Random(f"{seed}/{'/'.join(str(name) for name in names)}")
