"""What resources become: names with digests, pods that start again only for what needs it, reasons of refusals."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.support.operator.resources import MODEL, VOLUME, body, objects_of, one_of, stored
from tidegate.tools.operator.rendering.render import mentions, render
from tidegate.tools.operator.resource import Refused

GATEWAY: dict[str, Any] = {"modelsVolume": VOLUME, "pools": ["cores"]}
BROKER = "mqtt://broker:1883"
RAY: dict[str, Any] = {"redisAddress": "redis:6379"}
FLEET: dict[str, Any] = {"groups": [{"name": "kiosks"}, {"name": "tills", "nodeSelector": {"kind": "till"}}]}


def config_of(objects: list[dict[str, Any]], file: str) -> dict[str, Any]:
    maps = [one for one in objects if one["kind"] == "ConfigMap" and file in one["data"]]
    found: dict[str, Any] = yaml.safe_load(maps[0]["data"][file])
    return found


def template_of(objects: list[dict[str, Any]], kind: str, ending: str = "") -> dict[str, Any]:
    found: dict[str, Any] = one_of(objects, kind, ending)["spec"]["template"]
    return found


def test_equal_resources_become_equal_objects() -> None:
    assert objects_of(body("TidegateGateway", "main", **GATEWAY)) == objects_of(
        body("TidegateGateway", "main", **GATEWAY)
    )


def test_a_changed_configuration_is_another_config_map_and_another_template() -> None:
    before = objects_of(body("TidegateGateway", "main", **GATEWAY))
    after = objects_of(body("TidegateGateway", "main", **GATEWAY, config={"fleet": "shops"}))

    maps = [one_of(objects, "ConfigMap")["metadata"]["name"] for objects in (before, after)]
    assert maps[0] != maps[1], "a pod that starts again in between finds the one that it was made with"
    templates = [template_of(objects, "Deployment") for objects in (before, after)]
    for name, template in zip(maps, templates, strict=True):
        assert template["spec"]["volumes"][0]["configMap"]["name"] == name
    assert templates[0]["metadata"]["annotations"] != templates[1]["metadata"]["annotations"]


@pytest.mark.parametrize(
    "change", [{"replicas": 3}, {"service": {"type": "LoadBalancer"}}, {"pdb": {"enabled": False}}]
)
def test_what_no_process_reads_starts_none_again(change: dict[str, Any]) -> None:
    fixed = {**GATEWAY, "config": {"gateways": 2}}
    before = objects_of(body("TidegateGateway", "main", **fixed))
    after = objects_of(body("TidegateGateway", "main", **{**fixed, **change}))

    assert template_of(before, "Deployment") == template_of(after, "Deployment")
    assert before != after


def test_the_resources_own_keys_win() -> None:
    config = config_of(objects_of(body("TidegateGateway", "main", **GATEWAY, config={"http_port": 9000})), "site.yaml")

    assert (config["http_port"], config["grpc_port"]) == (9000, 8001)
    assert config["discovery"] == [{"source": "kubernetes", "service": "cores-pool", "port_name": "grpc"}]


def test_a_gateway_may_read_endpoints_only_where_it_looks_for_pools() -> None:
    alone = objects_of(body("TidegateGateway", "main", modelsVolume=VOLUME))

    assert [one for one in alone if one["kind"] in ("Role", "RoleBinding")] == []
    assert one_of(alone, "ServiceAccount")["automountServiceAccountToken"] is False
    role = one_of(objects_of(body("TidegateGateway", "main", **GATEWAY)), "Role")
    assert [rule["resources"] for rule in role["rules"]] == [["endpointslices"]]


def test_who_scales_a_pool_alone_sets_its_replicas() -> None:
    scaled = objects_of(body("TidegatePool", "gpus", modelsVolume=VOLUME, autoscaling={"kind": "hpa"}))
    fixed = objects_of(body("TidegatePool", "gpus", modelsVolume=VOLUME, replicas=3))

    assert "replicas" not in one_of(scaled, "StatefulSet")["spec"]
    kinds = [one["kind"] for one in scaled]
    assert kinds.index("HorizontalPodAutoscaler") > kinds.index("StatefulSet"), "a pool serves before KEDA is there"
    target = one_of(scaled, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert target["name"] == one_of(scaled, "StatefulSet")["metadata"]["name"]
    assert one_of(fixed, "StatefulSet")["spec"]["replicas"] == 3


@pytest.mark.slow
def test_keda_asks_the_gateway_where_it_says_its_metrics_are() -> None:
    pool = body("TidegatePool", "gpus", modelsVolume=VOLUME, autoscaling={"kind": "keda", "gateway": "main"})
    tls = {"mode": "csi", "issuerName": "ca"}
    plain = body("TidegateGateway", "main", **GATEWAY, config={"metrics_port": 9002})
    encrypted = body("TidegateGateway", "main", **GATEWAY, tls=tls)

    def asked(*others: dict[str, Any]) -> dict[str, str]:
        (trigger,) = one_of(objects_of(pool, *others), "ScaledObject")["spec"]["triggers"]
        return {key: trigger["metadata"].get(key, "") for key in ("url", "unsafeSsl")}

    host = "main-gateway-metrics.prod.svc"
    assert asked() == {"url": f"http://{host}:8002/scaling", "unsafeSsl": ""}, "the gateway may come later"
    assert asked(plain) == {"url": f"http://{host}:9002/scaling", "unsafeSsl": ""}
    assert asked(encrypted) == {"url": f"https://{host}:8002/scaling", "unsafeSsl": "true"}
    volumes = template_of(objects_of(encrypted), "Deployment")["spec"]["volumes"]
    names = next(one for one in volumes if one["name"] == "pki")["csi"]["volumeAttributes"]
    assert {host, f"{host}.cluster.local"} <= set(names["csi.cert-manager.io/dns-names"].split(","))
    assert list(mentions(stored(plain).key, [stored(pool)])) == [stored(pool).key], "a changed port is asked for anew"


def test_a_gateway_without_a_metrics_port_scales_nothing() -> None:
    pool = body("TidegatePool", "gpus", modelsVolume=VOLUME, autoscaling={"kind": "keda", "gateway": "main"})
    gateway = stored(body("TidegateGateway", "main", **GATEWAY, config={"metrics_port": 0}))
    left_out, asked_anew = render(stored(pool), {gateway.key: gateway}), render(stored(pool), {})

    assert [one for one in asked_anew.objects if one["kind"] != "ScaledObject"] == left_out.objects, "it serves"
    said, later = left_out.conditions[0], asked_anew.conditions[0]
    assert (said.type, said.status, said.reason, "metrics_port" in said.message) == (
        "Autoscaled", "False", "NoMetrics", True
    )  # fmt: skip
    assert (later.type, later.status, later.message) == ("Autoscaled", "True", ""), "what was said does not stay"
    never = render(stored(body("TidegatePool", "gpus", modelsVolume=VOLUME)), {}).conditions
    assert [(one.type, one.status, one.message) for one in never] == [
        ("Autoscaled", "False", ""),
        ("Monitored", "False", ""),
    ]


def test_every_object_goes_with_its_resource() -> None:
    for one in objects_of(body("TidegatePool", "gpus", modelsVolume=VOLUME, autoscaling={"kind": "hpa"})):
        (owner,) = one["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("TidegatePool", "gpus", "uid-gpus")
        assert one["metadata"]["namespace"] == "prod"


def test_settings_of_devices_change_without_a_start() -> None:
    before = objects_of(body("TidegateFleet", "shops", **FLEET))
    groups = [{"name": "kiosks", "settings": {"max_queue_size": 8}}, FLEET["groups"][1]]
    after = objects_of(body("TidegateFleet", "shops", groups=groups))

    assert [one for one in before if one["kind"] == "DaemonSet"] == [one for one in after if one["kind"] == "DaemonSet"]
    settings = one_of(after, "ConfigMap", "-settings")["data"]
    assert (settings["kiosks.yaml"], settings["tills.yaml"]) == ("max_queue_size: 8\n", "")


def test_each_group_has_its_nodes_and_its_settings() -> None:
    objects = objects_of(body("TidegateFleet", "shops", **FLEET))
    kiosks, tills = (template_of(objects, "DaemonSet", name)["spec"] for name in ("-kiosks", "-tills"))

    assert kiosks["nodeSelector"] == {"tidegate.dev/group": "kiosks"}
    assert tills["nodeSelector"] == {"kind": "till"}
    followed = {one["name"]: one.get("value") for one in tills["containers"][0]["env"]}["TIDEGATE_EDGE_DEVICE_FILE"]
    mounts = {one["name"]: one for one in tills["containers"][0]["volumeMounts"]}
    assert followed == f"{mounts['settings']['mountPath']}/tills.yaml"
    assert "subPath" not in mounts["settings"], "a file by subPath never changes"


def test_gateways_mount_a_models_manifest_and_pools_its_files() -> None:
    model = body("TidegateModel", "digits-1", **MODEL)
    gateway = objects_of(body("TidegateGateway", "main", models=["digits-1"]), model)
    pool = objects_of(body("TidegatePool", "cores", models=["digits-1"]), model)

    for objects, kind, source in ((gateway, "Deployment", "configMap"), (pool, "StatefulSet", "image")):
        spec = template_of(objects, kind)["spec"]
        (volume,) = [one for one in spec["volumes"] if one["name"].startswith("model-")]
        (mount,) = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == volume["name"]]
        assert source in volume
        assert mount["mountPath"] == "/var/lib/tidegate/models/digits/1"
    manifest = one_of(objects_of(model), "ConfigMap")
    assert yaml.safe_load(manifest["data"]["model.yaml"])["name"] == "digits"


def test_a_changed_manifest_starts_who_mounts_it_again() -> None:
    model = body("TidegateModel", "digits-1", **MODEL)
    changed = body("TidegateModel", "digits-1", **{**MODEL, "manifest": {**MODEL["manifest"], "summary": "other"}})
    gateway = body("TidegateGateway", "main", models=["digits-1"])

    first, second = (template_of(objects_of(gateway, one), "Deployment") for one in (model, changed))
    assert first["metadata"]["annotations"] != second["metadata"]["annotations"]
    keys = list(mentions(stored(model).key, [stored(gateway), stored(body("TidegateGateway", "other", **GATEWAY))]))
    assert [key.name for key in keys] == ["main"]


@pytest.mark.parametrize(
    ("sent", "reason", "word"),
    [
        (body("TidegateGateway", "a", models=["none"]), "NoModel", "'none'"),
        (
            body("TidegateGateway", "a", modelsVolume=VOLUME, config={"admin_host": "0.0.0.0"}),
            "InvalidConfig", "admin_host",
        ),
        (
            body("TidegateGateway", "a", modelsVolume=VOLUME, config={"grpc_port": 8000}), "InvalidConfig", "8000"
        ),
        (
            body("TidegateGateway", "a", modelsVolume=VOLUME, config={"http_port": 0}),
            "InvalidConfig", "spec.config.http_port",
        ),
        (body("TidegatePool", "a", modelsVolume=VOLUME, config={"grpc_port": 0}), "InvalidConfig", "grpc_port"),
        (body("TidegatePool", "a", modelsVolume=VOLUME, config={"servers": 2}), "InvalidConfig", "spec.config.servers"),
        (body("TidegatePool", "a", modelsVolume=VOLUME, ray=RAY), "InvalidConfig", "spec.config.mqtt"),
        (
            body("TidegatePool", "a", modelsVolume=VOLUME, ray=RAY, config={"mqtt": BROKER, "grpc_port": 0}),
            "InvalidConfig", "grpc_port",
        ),
        (
            body("TidegatePool", "a", modelsVolume=VOLUME, ray=RAY, config={"mqtt": BROKER, "servers": 2}),
            "InvalidConfig", "spec.config.servers",
        ),
        (
            body("TidegateModel", "m", model="digits", version="2", manifest=MODEL["manifest"]),
            "InvalidManifest", "digits 1",
        ),
        (
            body("TidegateModel", "m", model="digits", version="1", manifest={"name": "x"}),
            "InvalidManifest", "spec.manifest",
        ),
    ],
)  # fmt: skip
def test_what_only_the_models_can_tell_is_refused_with_the_reason(sent: dict[str, Any], reason: str, word: str) -> None:
    with pytest.raises(Refused) as refused:
        objects_of(sent)

    assert (refused.value.reason, word in str(refused.value)) == (reason, True), str(refused.value)


def test_a_pool_cannot_have_a_model_without_files() -> None:
    model = body("TidegateModel", "digits-1", **{key: one for key, one in MODEL.items() if key != "volume"})
    with pytest.raises(Refused, match="no volume"):
        objects_of(body("TidegatePool", "cores", models=["digits-1"]), model)
    assert objects_of(body("TidegateGateway", "main", models=["digits-1"]), model)


def test_a_key_that_names_an_argument_is_an_unknown_key() -> None:
    """A server without our schema could store it; it must not become an argument of ours."""
    resource = stored(body("TidegateGateway", "main", **GATEWAY))
    spec = {**resource.spec, "config": {"path": "/etc/passwd", "model": 1}}
    with pytest.raises(Refused, match="unknown key 'path'"):
        render(type(resource)(resource.key, "u", 1, spec, {}), {})
