"""The part of a pod that does not depend on the process: rights, mounts, certificates, spread over nodes.

The decisions are those of the Helm chart (`deploy/helm/tidegate/templates/_helpers.tpl`), and a test holds both against
each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from tidegate.tools.operator.rendering.model import MountedModel
from tidegate.tools.operator.rendering.objects import CHECKSUM, ObjectFamily
from tidegate.tools.operator.rendering.process_config import MODELS, PKI
from tidegate.tools.operator.specs import ImageSpec, ServingSpec, TlsSpec

_USER: Final = 65532
POD_SECURITY: Final = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_TOPOLOGY: Final = ("topology.kubernetes.io/zone", "kubernetes.io/hostname")


def image(spec: ImageSpec, built: str) -> dict[str, str]:
    """Args:
    built: the name that the image is built under.
    """
    tag = spec.tag or version("tidegate")
    return {"image": f"{spec.repository or f'localhost/tidegate-{built}'}:{tag}", "imagePullPolicy": spec.pull_policy}


def name_variable(role: str, path: str = "metadata.name") -> dict[str, Any]:
    """The variable by which a process learns its name, from a field of its pod."""
    return {"name": f"TIDEGATE_{role.upper()}_NAME", "valueFrom": {"fieldRef": {"fieldPath": path}}}


def pod_template(
    part: ObjectFamily,
    spec: ServingSpec,
    container: Mapping[str, Any],
    *,
    config_map: Mapping[str, Any],
    models: Sequence[MountedModel],
    tmp: Mapping[str, Any],
    grace_s: int,
    checksum: str,
    dns_names: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The template of a Deployment or a StatefulSet.

    Args:
        container: what is the process's own of its container.
        config_map: mounted at /etc/tidegate.
        tmp: the emptyDir of /tmp.
        dns_names: of the Service, for certificates.
        more: fields of the pod.
    """
    full = {
        **container,
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [*_mounts(spec, models), *spec.extra_volume_mounts],
        **({"envFrom": spec.env_from} if spec.env_from else {}),
    }
    pod: dict[str, Any] = {
        "serviceAccountName": part.name,
        # Of a Service `x-gateway-metrics` Kubernetes would make a variable that is a key of ours.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": POD_SECURITY,
        "containers": [full],
        "volumes": _volumes(part, spec, config_map, models, tmp, dns_names),
        **(more or {}),
    }
    if spec.spread != "none":
        pod["topologySpreadConstraints"] = [
            {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": spec.spread,
             "labelSelector": {"matchLabels": part.selector}}
            for key in _TOPOLOGY
        ]  # fmt: skip
    optional = {
        "imagePullSecrets": [{"name": one} for one in spec.image_pull_secrets],
        "nodeSelector": spec.node_selector,
        "tolerations": spec.tolerations,
        "affinity": spec.affinity,
    }
    pod |= {key: value for key, value in optional.items() if value}
    meta = {"labels": part.labels, "annotations": {CHECKSUM: checksum, **spec.pod_annotations}}
    return {"metadata": meta, "spec": pod}


def disruption_budget(part: ObjectFamily, spec: ServingSpec) -> list[dict[str, Any]]:
    if not spec.pdb.enabled:
        return []
    said = {"maxUnavailable": spec.pdb.max_unavailable, "selector": {"matchLabels": part.selector}}
    return [part.object("policy/v1", "PodDisruptionBudget", spec=said)]


def _mounts(spec: ServingSpec, models: Sequence[MountedModel]) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": "/etc/tidegate"},
        {"name": "state", "mountPath": "/var/lib/tidegate"},
    ]
    if spec.models_volume:
        sub = {"subPath": spec.models_sub_path} if spec.models_sub_path else {}
        mounts.append({"name": "models", "mountPath": MODELS, "readOnly": True, **sub})
    mounts += [one for model in models for one in model.mounts]
    mounts.append({"name": "tmp", "mountPath": "/tmp"})
    if spec.tls.mode != "none":
        mounts.append({"name": "pki", "mountPath": PKI, "readOnly": True})
    return mounts


def _volumes(
    part: ObjectFamily,
    spec: ServingSpec,
    config_map: Mapping[str, Any],
    models: Sequence[MountedModel],
    tmp: Mapping[str, Any],
    dns_names: Sequence[str],
) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": config_map["metadata"]["name"]}},
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": dict(tmp)},
    ]
    if spec.models_volume:
        volumes.append({"name": "models", **spec.models_volume})
    volumes += [one for model in models for one in model.volumes]
    if spec.tls.mode != "none":
        volumes.append(_certificates(part.component, spec.tls, dns_names))
    return [*volumes, *spec.extra_volumes]


def _certificates(role: str, tls: TlsSpec, dns_names: Sequence[str]) -> dict[str, Any]:
    if tls.mode == "secret":
        return {"name": "pki", "secret": {"secretName": tls.secret, "defaultMode": 0o440}}
    names = [f"${{POD_NAME}}.{role}.tidegate.internal", *dns_names, *tls.hosts]
    prefix = "csi.cert-manager.io"
    attributes = {
        f"{prefix}/issuer-name": tls.issuer_name,
        f"{prefix}/issuer-kind": tls.issuer_kind,
        f"{prefix}/common-name": f"{'gw' if role == 'gateway' else 'pool'}~${{POD_NAME}}",
        f"{prefix}/uri-sans": f"tidegate://{role}/${{POD_NAME}}",
        f"{prefix}/dns-names": ",".join(names),
        f"{prefix}/key-usages": "digital signature,key encipherment,server auth,client auth",
        f"{prefix}/fs-group": str(_USER),
    }
    return {"name": "pki", "csi": {"driver": prefix, "readOnly": True, "volumeAttributes": attributes}}
