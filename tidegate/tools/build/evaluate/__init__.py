"""Measurements of finished artefacts: quality, latency, cost tables and the confidence threshold of escalation.

The commands in `tidegate/tools/build` and the demo builders import them. Making an artefact belongs in `convert`.
"""
