"""The edge agent answers requests on a device from quantized ONNX models, with or without a network.

`app.py` composes it: `serving` answers, `delivery` rolls models out, `offline` keeps what a gateway shall have later,
`fleet` reports over MQTT and dials gateways, `device` reads sensors and memory, `commands` are the operator's tools,
and `core` holds the decisions without IO. Other packages start it by `cli.py` and import nothing from it; code shared
with the gateway or the pool belongs in `tidegate`.
"""
