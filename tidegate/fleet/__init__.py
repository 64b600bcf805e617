"""The messages of the fleet over MQTT: topics, schemas, and the bounds that every field is checked against.

The edge agent and the gateway import the message types. The code is pure: the transport is `tidegate/mqtt`, and merging
the messages into a view of the fleet is the gateway's.
"""
