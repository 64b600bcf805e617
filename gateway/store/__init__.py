"""What gateways side by side keep together in a Redis or Valkey, if there is one; nothing on a request's way asks it.

Others import `SharedStore`, the connection, and `QuotaLeaser`, which leases quotas. What is decided from the answers
lies in `gateway/core`; rollouts and ingest keep what is theirs in `gateway/delivery` and `gateway/ingest`, by scripts
that run here.
"""
