"""Rollouts of models and of devices' settings: an operator's order, its journal on disk, and the controller.

`DeliveryService` imports the controller, which publishes documents, and its routes. The state machine is
`gateway/core/versions/canary`; documents are signed where the operator's key is (`tidegate/rollout`), never here.
"""
