"""The connections to everything that answers requests: links that the gateway dials, streams that devices dial, and
plain OIP to foreign servers. Others import `Directory`, which opens and closes targets as the fleet changes, and
`Target`, the protocol that all of them implement. Which target gets a request is decided in `gateway/core/placement`.
"""
