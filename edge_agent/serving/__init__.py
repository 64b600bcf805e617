"""Room edge_agent/serving."""
