"""This room is about the gateways that serve beside this one: who they are, and which part of a whole is this one's.

Others import `Peers`, which knows them, `PeerReport`, what one says of itself, and `fair_share`. What is shared lies
where it is used: quotas in `gateway/core/admission`, the price of the cloud in `gateway/core/placement`, the need for
replicas in `gateway/core/fleet`. How reports travel belongs to `gateway/fleet_sync`.
"""
