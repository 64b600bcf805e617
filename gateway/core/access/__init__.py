"""This room holds the rules of who may call and where a device may be reached: keys, entitlements, networks, dial-in.

Layers and servers import its checks and the sequence names of tenants. Verifying certificates and reading key files is
IO and belongs to `gateway/identity` and `tidegate/security`.
"""
