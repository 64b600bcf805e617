"""The gateway's configuration: one frozen model for the process (`gateway`), and one module for each of its sections.

The composition root and the command line import `GatewayConfig`; the modules that a section configures import that
section. Derived values (`spec`, `grant`, `networks`) translate into the plain types of `gateway/core`. Nothing here
reads a file or the environment at import, and no rule of `gateway/core` is decided here.
"""
