"""What each custom resource may say: the fields of its `spec`, with their bounds and defaults.

Fields are written as Kubernetes writes them (`drainSeconds`). Inside of `config` are the keys of the process's own
configuration, as `docs/configuration-reference.md` has them: their schema is that of the configuration's model
(`definitions.py`), so a resource can say what a file can say, and nothing else. What is Kubernetes' own (volumes,
tolerations, resources) is taken in Kubernetes' words and checked by Kubernetes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from tidegate.config import Section

Kubernetes = dict[str, Any]  # an object in Kubernetes' own words
ObjectName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(ge=0, le=3600)]
Texts = dict[str, str]
MAX_ORDER_BYTES = 1_000_000  # an object in etcd has at most 1.5 MiB


class Spec(Section):
    """A part of a resource; its keys are in camelCase."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True)


class ImageSpec(Spec):
    """Where the image is; the tag of an image without one is the operator's version."""

    repository: str = Field("", max_length=512, description="Empty: localhost/tidegate-…, as the images are built.")
    tag: str = Field("", max_length=128, description="Empty: the operator's own version.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field("IfNotPresent", description="As in a container.")


class TlsSpec(Spec):
    """Certificates between gateway, pools and broker; each pod needs its own, because it is known by its name."""

    mode: Literal["none", "csi", "secret"] = Field(
        "none",
        description="none: plain text. csi: cert-manager's CSI driver makes one a pod. secret: one Secret "
        "(tls.crt, tls.key, ca.crt), for one replica.",
    )
    issuer_name: str = Field("", max_length=253, description="With csi: the issuer of the fleet's CA.")
    issuer_kind: str = Field("Issuer", max_length=63, description="With csi: Issuer or ClusterIssuer.")
    secret: str = Field("", max_length=253, description="With secret: its name.")
    hosts: list[Annotated[str, Field(max_length=253)]] = Field(
        [], max_length=32, description="With csi: names in the certificate beside those in the cluster."
    )


class DisruptionSpec(Spec):
    """The PodDisruptionBudget."""

    enabled: bool = Field(True, description="Whether there is one.")
    max_unavailable: int = Field(1, ge=1, le=1000, description="How many pods may be evicted at once.")


class MonitorSpec(Spec):
    """What the Prometheus operator scrapes by: a ServiceMonitor of gateways and pools, a PodMonitor of a fleet."""

    enabled: bool = Field(False, description="Whether there is one. Needs the Prometheus operator's resources.")
    interval: str = Field("15s", pattern=r"^[0-9]+(ms|s|m)$", description="Between two scrapes.")
    labels: Texts = Field({}, description="Labels of the monitor, by which a Prometheus chooses it.")


class PolicySpec(Spec):
    """The NetworkPolicy, as far as gateways and pools have the same."""

    enabled: bool = Field(True, description="Whether there is one.")
    monitoring: list[Kubernetes] = Field(
        [{"namespaceSelector": {}}], max_length=32,
        description="Who may read metrics and /scaling, KEDA's operator for one: peers of a NetworkPolicy. Empty: "
        "everything that reaches it.",
    )  # fmt: skip


class GatewayPolicySpec(PolicySpec):
    """The NetworkPolicy of a gateway: who may call it."""

    callers: list[Kubernetes] = Field(
        [], max_length=32, description="Peers of a NetworkPolicy. Empty: everything that reaches it."
    )


class PoolPolicySpec(PolicySpec):
    """The NetworkPolicy of a pool: gateways of its namespace send it work, and it calls DNS, its URLs and these."""

    egress: list[Kubernetes] = Field(
        [], max_length=32,
        description="What it may reach beside DNS and the ports of its broker and its collector of traces: rules of a "
        "NetworkPolicy.",
    )  # fmt: skip


class ServingSpec(Spec):
    """What gateways and pools have in common."""

    models: list[ObjectName] = Field(
        [], max_length=64, description="Names of TidegateModels in this namespace, which are mounted."
    )
    models_volume: Kubernetes | None = Field(
        None, description="Instead: a volume source with a folder per model and version, mounted read-only."
    )
    models_sub_path: str = Field("", max_length=512, description="A folder in modelsVolume.")
    tls: TlsSpec = Field(TlsSpec.model_validate({}), description="Certificates between gateway, pools and broker.")
    env: list[Kubernetes] = Field([], max_length=128, description="Variables of the container, such as secrets.")
    env_from: list[Kubernetes] = Field([], max_length=64, description="Sources of variables of the container.")
    resources: Kubernetes = Field({}, description="Requests and limits of the container.")
    pdb: DisruptionSpec = Field(DisruptionSpec.model_validate({}), description="The PodDisruptionBudget.")
    service_monitor: MonitorSpec = Field(
        MonitorSpec.model_validate({}), description="The ServiceMonitor; there is none without a metrics_port."
    )
    node_selector: Texts = Field({}, description="As in a pod.")
    tolerations: list[Kubernetes] = Field([], max_length=64, description="As in a pod.")
    affinity: Kubernetes = Field({}, description="As in a pod.")
    pod_annotations: Texts = Field({}, description="Annotations of the pods.")
    image_pull_secrets: list[ObjectName] = Field([], max_length=16, description="Names of Secrets for the registry.")
    extra_volumes: list[Kubernetes] = Field([], max_length=32, description="More volumes of the pod.")
    extra_volume_mounts: list[Kubernetes] = Field([], max_length=32, description="Where they are in the container.")
    spread: Literal["ScheduleAnyway", "DoNotSchedule", "none"] = Field(
        "ScheduleAnyway", description="How strictly pods are spread over zones and nodes."
    )


class ServiceSpec(Spec):
    """The Service of callers."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field("ClusterIP", description="As in a Service.")
    annotations: Texts = Field({}, description="Annotations of the Service.")


class TidegateGatewaySpec(ServingSpec):
    """Gateways of one name: a Deployment behind a Service."""

    replicas: int = Field(2, ge=0, le=64, description="How many gateways there are.")
    image: ImageSpec = Field(ImageSpec.model_validate({}), description="Where the gateway's image is.")
    pools: list[ObjectName] = Field([], max_length=16, description="Names of TidegatePools in this namespace.")
    config: dict[str, Any] = Field(
        {},
        description="Keys of the gateway's configuration; they win over those that the operator sets (host, "
        "model_repository, discovery, gateways, drain_s, tls). The name is the pod's.",
    )
    service: ServiceSpec = Field(ServiceSpec.model_validate({}), description="The Service of callers.")
    network_policy: GatewayPolicySpec = Field(
        GatewayPolicySpec.model_validate({}), description="The NetworkPolicy: who may call it and read its metrics."
    )
    pre_stop_sleep_seconds: Seconds = Field(
        5, description="Between the end of a pod and its drain; load balancers hear of it then."
    )
    drain_seconds: Seconds = Field(30, description="At most so long requests under way are waited for.")


class AutoscalingSpec(Spec):
    """Who sets the number of replicas, by what gateways say that they need."""

    kind: Literal["none", "keda", "hpa"] = Field(
        "none", description="keda: a ScaledObject on a gateway's /scaling. hpa: the metric, by prometheus-adapter."
    )
    gateway: str = Field("", max_length=63, description="With keda: the TidegateGateway that is asked.")
    min_replicas: int = Field(1, ge=1, le=1000, description="Never fewer.")
    max_replicas: int = Field(16, ge=1, le=1000, description="Never more.")
    polling_interval: int = Field(15, ge=1, le=3600, description="Seconds between KEDA's questions.")


class RedisPasswordSpec(Spec):
    """The Secret with the password of the Redis behind Ray's control store."""

    name: ObjectName = Field(description="The Secret's name.")
    key: str = Field("password", min_length=1, max_length=253, description="The key in it.")


class RaySpec(Spec):
    """A Ray cluster that KubeRay keeps, with one worker a replica."""

    redis_address: str = Field(
        max_length=260, pattern=r"^[A-Za-z0-9._-]+:[0-9]{1,5}$",
        description="host:port of the Redis behind Ray's control store; without one a lost head loses the cluster.",
    )  # fmt: skip
    redis_password: RedisPasswordSpec | None = Field(None, description="Where its password is.")
    reconnect_timeout_seconds: int = Field(
        600, ge=60, le=86_400, description="Workers serve on for so long while the head is away."
    )
    cpus: float = Field(1.0, ge=0, le=1024, description="What Ray sets aside for a replica, of its worker's cores.")
    max_workers: int = Field(16, ge=1, le=1000, description="Never more workers.")
    head_resources: Kubernetes = Field({}, description="Requests and limits of the head, which runs no replica.")


class TidegatePoolSpec(ServingSpec):
    """A pool: a StatefulSet, because a pool's name is what its measured costs are kept under; or replicas on Ray."""

    replicas: int = Field(1, ge=0, le=1000, description="How many there are, without autoscaling.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Which image is taken, and whether it asks for GPUs.")
    gpus: int = Field(1, ge=0, le=16, description="GPUs of each replica, with device cuda.")
    gpu_resource: str = Field("nvidia.com/gpu", max_length=253, description="What a GPU is called in the cluster.")
    image: ImageSpec = Field(ImageSpec.model_validate({}), description="Where the pool's image is.")
    config: dict[str, Any] = Field(
        {},
        description="Keys of the pool's configuration; they win over those that the operator sets (host, ports, "
        "model_repository, device, tls). The name is the pod's.",
    )
    autoscaling: AutoscalingSpec = Field(
        AutoscalingSpec.model_validate({}), description="Who sets the number of replicas."
    )
    network_policy: PoolPolicySpec = Field(
        PoolPolicySpec.model_validate({}), description="The NetworkPolicy; there is none with ray."
    )
    ray: RaySpec | None = Field(
        None, description="With it the pool is a RayService of KubeRay's (docs/ray.md), not a StatefulSet."
    )
    runtime_class_name: str = Field("", max_length=253, description="As in a pod.")
    start_seconds: int = Field(600, ge=5, le=86_400, description="How long a start may take, warm-up included.")
    pre_stop_sleep_seconds: Seconds = Field(2, description="Gateways hear in this time that a pod ends.")


class TidegateModelSpec(Spec):
    """One version of a model: its manifest, and the volume that its files lie on."""

    model: str = Field(
        min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="The model's name."
    )
    version: str = Field(
        min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Its version."
    )
    manifest: dict[str, Any] = Field(
        description="What the version's model.yaml says, with the digests of its files. Gateways need no more."
    )
    volume: Kubernetes | None = Field(
        None, description="A volume source with the version's files, such as an OCI image; without one no pool has it."
    )
    sub_path: str = Field("", max_length=512, description="The folder of the version in the volume.")


class NodeGroupSpec(Spec):
    """A NodeGroup of KubeEdge's, whose nodes run the agents of a group by an EdgeApplication."""

    name: ObjectName = Field(description="The NodeGroup's name; it is not the operator's.")
    nodes: int = Field(ge=0, le=100_000, description="How many nodes it has: so many agents, one a node.")


class FleetGroupSpec(Spec):
    """Devices of one group: the nodes that a selector chooses, with settings of their own."""

    name: ObjectName = Field(description="The group, as in `rollout.groups`.")
    node_selector: Texts = Field({}, description="Which nodes; empty: those with tidegate.dev/group=NAME.")
    node_group: NodeGroupSpec | None = Field(
        None, description="Instead: a NodeGroup of KubeEdge's, by an EdgeApplication and not a DaemonSet."
    )
    settings: dict[str, Any] = Field(
        {}, description="Settings that running agents follow without a restart (docs/configuring-devices.md)."
    )


class TidegateFleetSpec(Spec):
    """Edge agents on the nodes of a cluster, by group. Never an object per device."""

    groups: list[FleetGroupSpec] = Field(min_length=1, max_length=64, description="Disjoint groups of nodes.")
    image: ImageSpec = Field(ImageSpec.model_validate({}), description="Where the agent's image is.")
    config: dict[str, Any] = Field(
        {},
        description="Keys of the agent's configuration; they win over those that the operator sets. A change starts "
        "agents again, node by node; `settings` do not. The name is the node's.",
    )
    operator_keys: list[Annotated[str, Field(max_length=256)]] = Field(
        [], max_length=8, description="Public keys of `tidegate keys signing`, which devices trust for rollouts."
    )
    pki_path: str = Field(
        "/etc/tidegate/pki", max_length=512, description="Folder on a node with its certificate; empty: plain text."
    )
    state_path: str = Field("/var/lib/tidegate", max_length=512, description="Folder on a node with its state.")
    max_unavailable: str = Field(
        "10%", pattern=r"^([1-9][0-9]{0,4}|[1-9][0-9]?%|100%)$", description="How many nodes are changed at once."
    )
    resources: Kubernetes = Field({}, description="Requests and limits of the container.")
    tolerations: list[Kubernetes] = Field([], max_length=64, description="Beside those of edge nodes.")
    pod_monitor: MonitorSpec = Field(
        MonitorSpec.model_validate({}), description="The PodMonitor; there is none without a metrics_port."
    )


class TidegateRolloutSpec(Spec):
    """A rollout that was ordered and signed elsewhere. The operator hands it to the gateway that conducts it."""

    gateway: ObjectName = Field(description="Which gateway conducts it: the NAME of a --conductor of the operator.")
    order: str = Field(
        min_length=2, max_length=MAX_ORDER_BYTES,
        description="The signed order, as `tidegate model rollout --out` or `tidegate fleet configure --out` wrote it.",
    )  # fmt: skip
    state: Literal["running", "paused", "aborted"] = Field(
        "running", description="What shall become of it; aborted calls all devices back."
    )
