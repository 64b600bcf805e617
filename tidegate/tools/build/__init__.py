"""The `tidegate model` commands that make models: build, add, quantize, pack, calibrate, measure and list.

`convert`, `demo`, `evaluate` and `inspect` hold the steps; only the commands are imported from outside. torch, ONNX
Runtime and transformers may be imported here, by the command that needs them. Engines live in `tidegate/engines`.
"""
