"""TLS, certificates and attestation: who the other end of a connection is, and the evidence of what it runs.

Others import `tls.py` for connections, `certificate_identity.py` for roles and names, and `attestation` for evidence.
API keys and the rights of callers live in `gateway/identity`.
"""
