"""Attestation: how the evidence of what a target runs is made, sent and verified.

Edges and pools import `attester.py`, the gateway imports `proof.py` and `keys.py`. How placement uses a verdict belongs
in `gateway/core/fleet`.
"""
