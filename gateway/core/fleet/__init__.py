"""This room holds the fleet view: each target with its offers, queue, link, breakers, price and attestation.

Placement reads `Fleet` and `TargetView`; `gateway/targets` folds link events into them. Connections belong to
`gateway/targets`, and what devices say over MQTT belongs to `gateway/fleet_sync`.
"""
