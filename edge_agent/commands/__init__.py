"""Room edge_agent/commands."""
