"""The operators' view of a running gateway: state, decisions, devices, log levels and trials, on the admin port.

The composition root imports `operator_routes` and the middlewares of the admin and the metrics port; `gateway/commands`
reads the same routes over HTTP. Everything is rendered on request: what is measured or remembered belongs to
`gateway/observe` and `gateway/core/history`, and credentials belong to `gateway/identity`.
"""
