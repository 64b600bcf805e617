"""Room edge_agent/fleet."""
