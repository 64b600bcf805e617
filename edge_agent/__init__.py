"""The edge agent: answers on the device, from quantized ONNX models, with or without a network."""
