"""The operator's resources, judged as an API server judges them, and a Kubernetes API with faults."""
