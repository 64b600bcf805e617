"""The workflows for a public host run `.ci/run` and `make dist`, with the least rights, and nothing that may move.

They were never run there: what can be held here is their form, their scripts' grammar, and what they call.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart.rendering import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}")
IMAGE = re.compile(r"[a-z]+:[0-9]+\.[0-9]+")
RIGHTS = {"contents": {"read", "write", "none"}}


def read(path: Path) -> dict[str, Any]:
    # YAML 1.1 takes a bare `on` for true; the host does not.
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


def commands(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


def test_there_is_one_for_changes_and_one_for_releases() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    assert read(WORKFLOWS[0])["on"].keys() == {"push", "pull_request"}
    assert read(WORKFLOWS[1])["on"] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_whole_pinned_and_bounded(path: Path) -> None:
    found = read(path)

    assert found.keys() <= {"name", "on", "permissions", "concurrency", "jobs"}
    for job in found["jobs"].values():
        assert job.keys() <= {"runs-on", "container", "needs", "timeout-minutes", "permissions", "steps"}
        assert re.fullmatch(r"ubuntu-\d+\.\d+", job["runs-on"]), "no `latest`"
        assert IMAGE.fullmatch(job.get("container", "debian:12.11"))
        assert 0 < int(job["timeout-minutes"]) <= 180
        assert job.get("needs", "build") in read(path)["jobs"] or "needs" not in job
    for step in steps(path):
        assert ("run" in step) != ("uses" in step)
        assert step.keys() <= {"name", "run", "uses", "with", "env"}
        assert PINNED.fullmatch(step.get("uses", f"a/b@{'0' * 40}"))
    for line in path.read_text(encoding="utf-8").splitlines():
        if "uses:" in line:
            assert re.search(r" # v\d+\.\d+\.\d+$", line), "which version that commit is, for people"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_least_rights_and_no_secret(path: Path) -> None:
    found = read(path)

    assert found["permissions"] in ({"contents": "read"}, {}, ""), "what a job does not ask for it has not"
    assert "secrets" not in path.read_text(encoding="utf-8")
    writing = {name for name, job in found["jobs"].items() if "write" in (job.get("permissions") or {}).values()}
    assert writing == ({"draft"} if path.stem == "release" else set())
    for name, job in found["jobs"].items():
        assert all(value in RIGHTS[right] for right, value in (job.get("permissions") or {}).items())
        uses = [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
        assert name not in writing or "actions/checkout" not in uses, "what may write runs nothing of the repository"
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] == "false"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_its_scripts_are_scripts_into_which_nothing_is_pasted(path: Path) -> None:
    for command in commands(path):
        assert "${{" not in command, "a branch's name would be run; take it from the environment"
        subprocess.run(["bash", "-n", "-c", command], check=True, timeout=30)


def test_both_run_the_tests_as_a_desk_does_and_a_release_is_made_behind_them() -> None:
    ci, release = map(commands, WORKFLOWS)

    assert ".ci/run" in ci and ".ci/run" in release
    made = [command for command in release if command.startswith("make dist ")]
    assert len(made) == 1
    assert 'VERSION="${GITHUB_REF_NAME#v}"' in made[0], "a tag that pyproject.toml does not have makes no release"
    assert release.index(".ci/run") < release.index(made[0])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    called = {word for command in (*ci, *release) for word in re.findall(r"^make ([a-z-]+)", command, re.M)}
    assert called == {"dist", "docs"} and called <= targets
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert not [command for command in (*ci, *release) if re.search(r"\bpytest\b|\bmake test\b", command)]
