"""Conversions of a model's weights: export from torch, int8 quantization, and packing for the padding-free engine.

The commands in `tidegate/tools/build` import the conversions. Reading a finished file belongs in `inspect`.
"""

import tidegate.engines  # noqa: F401 - forbids ONNX Runtime's telemetry, before `quantize` and the builder load it
