"""The Helm chart, rendered by Helm's own engine and held against the schemas of Kubernetes."""
