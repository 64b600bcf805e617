"""The Kubernetes operator: custom resources become the objects that run gateways, pools and edge agents.

    specs → definitions     what a resource may say, and the CustomResourceDefinitions that are generated from it
    specs → rendering       a resource and the resources that it names become Kubernetes objects (pure)
    watching → reconciler → cluster_objects     resources are watched, rendered, applied, and told what became of them

The operator is a process of its own, and nothing needs it while nothing changes: the objects that it has applied run
without it. It holds no signing key: a rollout carries documents that were signed elsewhere. Configuration models are
found by entry point (`tidegate/tools/config_cli.py`), so this room imports no process.
"""
