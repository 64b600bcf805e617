"""Model delivery: artefacts for devices, rollouts that bring versions to them, and trials of two versions.

The composition root imports `DeliveryService` and `Trials`; `gateway/operate` shows rollouts and trials on its screens.
How a rollout proceeds and how a split chooses is decided without IO in `gateway/core/versions`; this room stores,
serves and publishes. What a device does with a document belongs to `edge_agent/delivery`.
"""
