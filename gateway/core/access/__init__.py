"""This room holds the rules of authorisation and of device addresses: keys, entitlements, networks and dial-in.

Layers and servers import its checks and the sequence names of tenants. Verifying certificates and reading key files is
IO and belongs to `gateway/identity` and `tidegate/security`.
"""
