"""This room decides which version of a model answers, and moves versions and settings to devices in waves.

Layers import the shares and the traffic split, and `gateway/delivery` performs what the canary rollout decides.
"""
