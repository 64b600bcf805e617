"""Resources become Kubernetes objects: values in, objects out. Nothing here reads a clock or asks the cluster."""
