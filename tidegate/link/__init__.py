"""The link stream: frames on one long-lived bidirectional gRPC stream, both ends."""
