"""Making models: export, quantize, train, calibrate, and the `tidegate model` commands."""
