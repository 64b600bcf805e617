"""Rollouts of models: an operator's order, its journal on disk, and the controller that publishes documents.

`DeliveryService` imports the controller and its routes. The state machine is `gateway/core/versions/canary`;
documents are signed where the operator's key is (`tidegate/rollout`), never here.
"""
