"""This room holds the state machine of one request: its attempts, hedges, fallbacks, escalations and sequence affinity.

`gateway/serving` performs the actions that it returns, with tasks and timers. Choosing a target belongs to
`gateway/core/placement`.
"""
