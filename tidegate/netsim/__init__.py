"""Room tidegate/netsim."""
