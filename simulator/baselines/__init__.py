"""The policies that a simulation compares: Tidegate's own, published ones, and one with perfect knowledge.

Others import `POLICIES` and `router` from `policies.py`, and `PerfectKnowledge` from `clairvoyant.py`. A policy that
the gateway serves with belongs in `gateway/core/placement`; what surrounds every policy alike belongs in
`simulator/world`.
"""
