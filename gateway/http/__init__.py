"""The HTTP description of the gateway: its OpenAPI document and the route that serves it.

The composition root imports the route. The inference protocol over HTTP is `tidegate/oip/http`, shared with the other
processes; no request is decided here.
"""
