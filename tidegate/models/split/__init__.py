"""What a manifest says of a model that may be cut between layers: pure values and their checks.

Manifests have the sections `split` and `half`, gateways decide by them, and `tidegate model split-layers` writes them.
Where a cut pays is decided in `gateway/core/placement/layer_split.py`; `tidegate/tools/build/split` cuts graphs.
"""
