"""The custom resources: generated from the models, structural, with rules that refuse what could never run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.operator import definition_files
from tests.support.operator.api_rules import defaulted, kept_schema, nodes, refusals
from tidegate.tools.config_cli import config_model
from tidegate.tools.operator.definitions import KIND_OF, KINDS, Kind, definition, schema_of
from tidegate.tools.operator.rendering.render import render
from tidegate.tools.operator.resource import CustomResource

EXAMPLES = Path(__file__).parents[4] / "deploy" / "operator" / "examples"
TAKEN_WORDS = {
    "type", "description", "enum", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "default",
    "minLength", "maxLength", "minProperties", "maxProperties", "pattern", "minItems", "maxItems", "nullable", "format",
    "properties", "items", "additionalProperties", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
}  # fmt: skip
RAY: dict[str, Any] = {"ray": {"redisAddress": "redis:6379"}}
MODELS: dict[str, Any] = {"modelsVolume": {"emptyDir": {}}}
# What the API server must refuse: a kind, a spec, and a word of what it says.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no models": ("TidegateGateway", {}, "name TidegateModels in models"),
    "two kinds of models": ("TidegateGateway", {**MODELS, "models": ["a"]}, "not both"),
    "unknown key": ("TidegateGateway", {**MODELS, "replica": 2}, "unknown field .spec.replica"),
    "unknown key of the gateway": ("TidegateGateway", {**MODELS, "config": {"http_prot": 1}}, ".spec.config.http_prot"),
    "unknown key in a section": (
        "TidegateGateway", {**MODELS, "config": {"limits": {"max_rnk": 3}}}, ".spec.config.limits.max_rnk"
    ),
    "value of the gateway": ("TidegateGateway", {**MODELS, "config": {"http_port": 70000}}, "http_port"),
    "type of a value": ("TidegateGateway", {**MODELS, "config": {"http_port": "8000"}}, "http_port"),
    "too many": ("TidegateGateway", {**MODELS, "replicas": 65}, "replicas"),
    "one certificate for two": (
        "TidegateGateway", {**MODELS, "tls": {"mode": "secret", "secret": "gw"}}, "set replicas to 1"
    ),
    "no issuer": ("TidegateGateway", {**MODELS, "tls": {"mode": "csi"}}, "tls.issuerName"),
    "no secret": ("TidegateGateway", {**MODELS, "replicas": 1, "tls": {"mode": "secret"}}, "tls.secret"),
    "a name of its own": ("TidegateGateway", {**MODELS, "config": {"name": "me"}}, "the pod's name"),
    "ended before it has drained": ("TidegateGateway", {**MODELS, "config": {"drain_s": 31}}, "drainSeconds"),
    "two discoveries": (
        "TidegateGateway",
        {**MODELS, "pools": ["a"], "config": {"discovery": [{"source": "file", "path": "/x"}]}},
        "pools or config.discovery",
    ),
    "precision of the pool": ("TidegatePool", {**MODELS, "config": {"precision": "fp8"}}, "precision"),
    "fewer than least": (
        "TidegatePool", {**MODELS, "autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas is above"
    ),
    "nobody to ask": ("TidegatePool", {**MODELS, "autoscaling": {"kind": "keda"}}, "autoscaling.gateway"),
    "cores and GPUs": ("TidegatePool", {**MODELS, "config": {"device": "cuda:1"}}, "the device that the image is for"),
    "one certificate for a scaled pool": (
        "TidegatePool", {**MODELS, "tls": {"mode": "secret", "secret": "p"}, "autoscaling": {"kind": "hpa"}}, "csi"
    ),
    "a Redis that is no address": ("TidegatePool", {**MODELS, "ray": {"redisAddress": "redis"}}, "redisAddress"),
    "a pool on Ray without Redis": ("TidegatePool", {**MODELS, "ray": {}}, "redisAddress"),
    "a pool on Ray that KEDA scales": (
        "TidegatePool", {**MODELS, **RAY, "autoscaling": {"kind": "keda", "gateway": "main"}}, "tidegate ray-scale"
    ),
    "a certificate a pod on Ray": (
        "TidegatePool", {**MODELS, **RAY, "tls": {"mode": "csi", "issuerName": "ca"}}, "config.tls"
    ),
    "no replica on Ray": ("TidegatePool", {**MODELS, **RAY, "replicas": 0}, "ray.maxWorkers"),
    "more replicas than workers": ("TidegatePool", {**MODELS, **RAY, "replicas": 17}, "ray.maxWorkers"),
    "a monitor of a pool on Ray": ("TidegatePool", {**MODELS, **RAY, "serviceMonitor": {"enabled": True}}, "metrics"),
    "one address for replicas on Ray": (
        "TidegatePool", {**MODELS, **RAY, "config": {"advertise": "10.0.0.1:9000"}}, "config.advertise"
    ),
    "an interval without a unit": (
        "TidegateGateway", {**MODELS, "serviceMonitor": {"enabled": True, "interval": "15"}}, "interval"
    ),
    "a policy's key of the other": (
        "TidegateGateway", {**MODELS, "networkPolicy": {"egress": []}}, ".spec.networkPolicy.egress"
    ),
    "nodes by both": (
        "TidegateFleet",
        {"groups": [{"name": "a", "nodeSelector": {"x": "y"}, "nodeGroup": {"name": "a", "nodes": 1}}]},
        "nodeSelector or nodeGroup",
    ),
    "a group of nobody knows how many": (
        "TidegateFleet", {"groups": [{"name": "a", "nodeGroup": {"name": "a"}}]}, "nodes"
    ),
    "no version": ("TidegateModel", {"model": "digits", "manifest": {}}, "version"),
    "a path as a model": ("TidegateModel", {"model": "../x", "version": "1", "manifest": {}}, "model"),
    "no group": ("TidegateFleet", {"groups": []}, "groups"),
    "a group of all": ("TidegateFleet", {"groups": [{"name": "all"}]}, "means every device"),
    "a setting that is none": (
        "TidegateFleet", {"groups": [{"name": "a", "settings": {"model_repository": "/x"}}]}, "model_repository"
    ),
    "a setting out of bounds": ("TidegateFleet", {"groups": [{"name": "a", "settings": {"nice": 20}}]}, "nice"),
    "a share of nodes": ("TidegateFleet", {"groups": [{"name": "a"}], "maxUnavailable": "0"}, "maxUnavailable"),
    "keys twice": (
        "TidegateFleet",
        {"groups": [{"name": "a"}], "operatorKeys": ["ed25519 x y"], "config": {"rollout": {"keys": ["/k"]}}},
        "operatorKeys or",
    ),
    "no order": ("TidegateRollout", {"gateway": "main"}, "order"),
    "an address as gateway": ("TidegateRollout", {"gateway": "https://evil.example", "order": "{}"}, "gateway"),
}  # fmt: skip


def resource(kind: str, spec: dict[str, Any], name: str = "main") -> dict[str, Any]:
    return {"apiVersion": "tidegate.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def examples() -> list[dict[str, Any]]:
    return [one for path in sorted(EXAMPLES.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]


@pytest.mark.slow
def test_the_files_of_the_chart_are_what_the_models_generate() -> None:
    there = {path.name: path.read_text() for path in definition_files.FOLDER.iterdir()}

    assert there == definition_files.texts(), "run python -m tests.support.operator.definition_files"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_schema_is_structural(kind: Kind) -> None:
    for path, node in nodes(schema_of(kind)):
        assert set(node) <= TAKEN_WORDS, path
        assert "type" in node or node.get("x-kubernetes-preserve-unknown-fields"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        if node.get("type") == "array":
            assert "items" in node, path
        if "default" in node:
            jsonschema.validate(defaulted(node, node["default"]), {"type": node["type"]})
    assert len(yaml.safe_dump(definition(kind))) < 250_000, "kubectl apply keeps a copy in an annotation of 256 KiB"


@pytest.mark.slow
def test_a_configuration_has_every_key_of_its_model_and_no_default() -> None:
    for kind in KINDS:
        if kind.role:
            config = schema_of(kind)["properties"]["spec"]["properties"]["config"]
            assert set(config["properties"]) == set(config_model(kind.role).model_fields)
            assert all("default" not in node for path, node in nodes(config) if path)


@pytest.mark.slow
def test_there_is_an_example_of_each_kind_and_each_is_taken() -> None:
    found = examples()

    assert {one["kind"] for one in found} == set(KIND_OF)
    for one in found:
        assert refusals(one) == []
        body = defaulted(kept_schema(one["kind"]), one)
        body["metadata"] |= {"namespace": "prod", "uid": "u"}
        parsed = CustomResource.of(one["kind"], body)
        assert (render(parsed, {}).objects != []) == (one["kind"] != "TidegateRollout")


@pytest.mark.parametrize("name", sorted(WRONG))
def test_what_could_never_run_is_refused_by_name(name: str) -> None:
    kind, spec, word = WRONG[name]

    found = refusals(resource(kind, spec))

    assert any(word in one for one in found), found


def test_names_leave_room_for_those_of_pods() -> None:
    spec = {**MODELS, "tls": {"mode": "csi", "issuerName": "ca"}}

    assert refusals(resource("TidegateGateway", spec, "a" * 15)) == []
    assert "15 characters" in refusals(resource("TidegateGateway", spec, "a" * 16))[0]
    assert "40 characters" in refusals(resource("TidegateGateway", MODELS, "a" * 41))[0]
    assert refusals(resource("TidegatePool", MODELS, "4gpus")) == []
    assert "begins with a letter" in refusals(resource("TidegatePool", {**MODELS, **RAY}, "4gpus"))[0]


def test_a_version_of_a_model_stays_that_version() -> None:
    before = next(one for one in examples() if one["kind"] == "TidegateModel")
    after = copy.deepcopy(before)
    after["spec"] |= {"version": "2"}

    assert "another TidegateModel" in refusals(after, before)[0]
    assert refusals(before, before) == []


def test_a_rollout_stays_what_was_signed_and_what_is_aborted_stays_so() -> None:
    before = next(one for one in examples() if one["kind"] == "TidegateRollout")
    other, aborted = copy.deepcopy(before), copy.deepcopy(before)
    other["spec"]["order"] += " "
    aborted["spec"]["state"] = "aborted"

    assert "make another one" in refusals(other, before)[0]
    assert refusals(aborted, before) == []
    assert "stays so" in refusals(before, aborted)[0]


@pytest.mark.parametrize("file", ["site.yaml", "cloud.yaml", "device.yaml"])
def test_what_a_process_takes_from_a_file_is_taken_from_a_resource(file: str) -> None:
    kind = {"site.yaml": "TidegateGateway", "cloud.yaml": "TidegatePool", "device.yaml": "TidegateFleet"}[file]
    config = yaml.safe_load((EXAMPLES.parents[1] / "config" / file).read_text())
    config.pop("name", None)
    spec: dict[str, Any] = {"groups": [{"name": "a"}]} if kind == "TidegateFleet" else dict(MODELS)

    assert refusals(resource(kind, {**spec, "config": config})) == []
