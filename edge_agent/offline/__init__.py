"""What a device keeps while no gateway is reachable: deferred requests, their answers, results and events.

The app imports `OfflineService`, `LocalHost` and `device_routes`; the store command imports `OfflineLedger`. The modes
of connectivity and the pace of sending are decided in `edge_agent/core`; MQTT itself belongs in `edge_agent/fleet`.
"""
