"""Room edge_agent/device."""
