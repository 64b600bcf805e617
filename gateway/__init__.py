"""The gateway: one endpoint that answers each request from the cheapest place that will make its deadline."""
