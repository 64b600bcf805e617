"""What a device keeps while there is no way to a gateway: deferred requests, their answers, results and events."""
