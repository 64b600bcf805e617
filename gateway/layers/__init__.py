"""Cross-cutting concerns around the conductor, one layer a file: a function from a service to a service."""
