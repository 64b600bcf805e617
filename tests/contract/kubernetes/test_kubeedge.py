"""The manifests for KubeEdge: known fields, one agent for all groups, and a configuration that really starts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from edge_agent.config import EdgeConfig
from edge_agent.configuration.boot import boot_configuration
from edge_agent.configuration.device_file import read_device_file
from tests.support.chart.rendering import ROOT, complaints_about, has_helm
from tidegate.config import load
from tidegate.security.device_bundle import HOME, IDENTITY

FOLDER = ROOT / "deploy" / "kubeedge"
needs_schemas = pytest.mark.skipif(not has_helm(), reason="`make checks` could not set up the schemas here")


def documents() -> list[dict[str, Any]]:
    return [one for path in sorted(FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]


def one(kind: str, name: str = "tidegate-edge") -> dict[str, Any]:
    return next(each for each in documents() if (each["kind"], each["metadata"]["name"]) == (kind, name))


def deployment() -> dict[str, Any]:
    (found,) = one("EdgeApplication")["spec"]["workloadTemplate"]["manifests"]
    return dict(found)


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    return dict(workload["spec"]["template"]["spec"])


@needs_schemas
@pytest.mark.slow
def test_kubernetes_and_kubeedge_know_every_field() -> None:
    misspelt, wrong = copy.deepcopy(one("EdgeApplication")), copy.deepcopy(one("DaemonSet"))
    misspelt["metadata"]["name"] = wrong["metadata"]["name"] = "wrong"
    misspelt["spec"]["workloadScope"]["targetNodeGroups"][0]["overrides"] = {}
    wrong["spec"]["template"]["spec"]["tolerance"] = []

    found = complaints_about([*documents(), deployment(), misspelt, wrong])

    assert [words for words in found if "/wrong (" not in words] == []
    assert len(found) >= 4, "each of the wrong ones, once a version"


def test_both_ways_run_the_same_agent() -> None:
    of_set, of_group = pod_of(one("DaemonSet")), pod_of(deployment())
    assert of_set["containers"] == of_group["containers"]
    assert of_set["volumes"] == of_group["volumes"]
    for key in ("securityContext", "tolerations", "enableServiceLinks", "automountServiceAccountToken"):
        assert of_set[key] == of_group[key]


def test_what_is_said_of_joining_names_the_folder_that_joining_makes() -> None:
    said = (FOLDER / "daemonset.yaml").read_text()
    assert "edge join" in said and str(HOME / IDENTITY) in said


@pytest.mark.slow
def test_settings_are_mounted_as_a_folder_so_that_they_can_change() -> None:
    pod = pod_of(one("DaemonSet"))
    mounts = pod["containers"][0]["volumeMounts"]
    assert all("subPath" not in each for each in mounts)
    folder = next(each["mountPath"] for each in mounts if each["name"] == "settings")
    files = one("ConfigMap", "tidegate-device")["data"]
    followed = [environment(pod)["TIDEGATE_EDGE_DEVICE_FILE"]]
    for group in one("EdgeApplication")["spec"]["workloadScope"]["targetNodeGroups"]:
        assert one("NodeGroup", group["name"])["spec"]["matchLabels"] == {"tidegate.dev/group": group["name"]}
        for override in group["overriders"]["envOverriders"]:
            assert override["containerName"] == pod["containers"][0]["name"]
            named = {each["name"]: each["value"] for each in override["value"]}
            assert (override["operator"] == "replace") == (named.keys() <= environment(pod).keys())
            followed += [named["TIDEGATE_EDGE_DEVICE_FILE"]] if "TIDEGATE_EDGE_DEVICE_FILE" in named else []
    assert {Path(path).name for path in followed} == set(files)
    assert {str(Path(path).parent) for path in followed} == {folder}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["default", "kiosks", "tills"])
def test_what_is_mounted_is_a_configuration_and_settings_that_an_agent_takes(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "edge.yaml").write_text(one("ConfigMap")["data"]["edge.yaml"])
    device_file = tmp_path / f"{group}.yaml"
    device_file.write_text(one("ConfigMap", "tidegate-device")["data"][f"{group}.yaml"])
    monkeypatch.setenv("TIDEGATE_EDGE_NAME", "node-1")
    monkeypatch.setenv("TIDEGATE_EDGE_DEVICE_FILE", str(device_file))
    monkeypatch.setenv("TIDEGATE_EDGE_ROLLOUT__GROUPS", f'["{group}"]')
    monkeypatch.setenv("TIDEGATE_EDGE_STATE_DIR", str(tmp_path / "state"))

    config = load(EdgeConfig, tmp_path / "edge.yaml")

    assert config.rollout is not None and config.rollout.groups == (group,)
    assert (config.name, config.device_file) == ("node-1", device_file)
    own = read_device_file(device_file, config)
    assert own.problem == "" and own.settings
    boot = boot_configuration(config)
    assert boot is not None and boot.record.settings_now == own.settings
