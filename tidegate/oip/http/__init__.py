"""OIP over HTTP: its JSON and binary codecs, the bounded reading of bodies, and the routes over a `ModelHost`.

A process mounts `OipRoutes` on an aiohttp application. The codecs are pure. Listening on a port is `tidegate/servers`.
"""
