"""The requirements with digests fit constraints.txt and pyproject.toml, and are what pip asks of such a file."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contract.surface.declared import PROJECT
from tests.support.chart.rendering import ROOT

FOLDER = ROOT / "deploy" / "requirements"
PIN = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?: ; (?P<marker>.+?))? \\")
DIGEST = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
# What builds, tries and tests is installed from constraints.txt; `demo` is `tidegate up`, with what builds.
# Ray is of the version that a cluster has.
NOT_RUN = {"build", "demo", "testing", "simulate", "dev", "ray"}


def loaded() -> ModuleType:
    path = ROOT / "deploy" / "release" / "hashed_requirements.py"
    spec = importlib.util.spec_from_file_location("hashed_requirements", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer = loaded()
SETS: dict[str, tuple[str, ...]] = writer.SETS


def pins(name: str) -> dict[str, re.Match[str]]:
    """The pins of a file by name, once its form is what pip's hash-checking mode asks for."""
    found: dict[str, re.Match[str]] = {}
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("# ") for line in lines[:3])
    goes_on = False
    for line in lines[3:]:
        if goes_on:
            digest = DIGEST.fullmatch(line)
            assert digest is not None, line
            goes_on = digest[1] is not None
        else:
            pin = PIN.fullmatch(line)
            assert pin is not None, line
            assert pin["name"] not in found
            found[pin["name"]], goes_on = pin, True
    assert not goes_on
    return found


def needed(roots: list[Requirement]) -> Iterator[str]:
    """What is installed here because of the roots, by the metadata of what is installed."""
    left, seen = [(root, "") for root in roots], set()
    while left:
        need, extra = left.pop()
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        for asked in ("", *need.extras):
            if (need.name, asked) not in seen:
                seen.add((need.name, asked))
                left += [(Requirement(line), asked) for line in distribution(need.name).requires or ()]
    for name in {name for name, _ in seen}:
        yield canonicalize_name(name)


def test_there_is_a_file_for_each_set_and_a_set_for_each_extra_that_runs() -> None:
    assert {path.stem for path in FOLDER.glob("*")} == set(SETS)
    covered = {extra for extras in SETS.values() for extra in extras}
    assert covered == set(PROJECT["optional-dependencies"]) - NOT_RUN


@pytest.mark.parametrize("name", sorted(SETS))
def test_every_pin_is_the_one_of_constraints_txt(name: str) -> None:
    constraints = writer.pins(ROOT / "constraints.txt")

    found = {package: pin["version"] for package, pin in pins(name).items()}

    assert found == {package: constraints.get(package) for package in found}


@pytest.mark.parametrize("name", sorted(SETS))
def test_it_holds_what_the_extras_need_here_and_each_marker_can_be_asked(name: str) -> None:
    found = pins(name)

    roots = writer.direct(SETS[name])
    try:
        wanted = set(needed(roots))
    except PackageNotFoundError as error:
        pytest.skip(f"not installed here: {error}")
    assert wanted <= found.keys()
    for pin in found.values():
        Requirement(f"{pin['name']}=={pin['version']}" + (f" ; {pin['marker']}" if pin["marker"] else ""))


def test_no_host_is_named_and_no_place_of_a_machine() -> None:
    for path in FOLDER.glob("*"):
        assert not re.search(r"://|\.(com|org|io|net)\b|(?<![\w.])/\w", path.read_text(encoding="utf-8"))


def package(name: str, version: str = "1.0", digest: str = "a", needs: tuple[str, ...] = ()) -> tuple[str, object]:
    return name, writer.Package(name, version, tuple(map(Requirement, needs)), digest * 64)


ARM = "arm; platform_machine == 'aarch64'"
OLD, NEW = writer.Target("3.11", "x86_64"), writer.Target("3.13", "aarch64")


def test_markers_are_asked_of_the_target_and_not_of_this_interpreter() -> None:
    found = dict(
        [
            package(
                "root", needs=('old; python_version < "3.12"', 'arm; platform_machine == "aarch64"', "extra[more]")
            ),
            package("old"),
            package("arm"),
            package("extra", needs=('deep; extra == "more"', 'never; extra == "less"')),
            package("deep"),
        ]
    )

    assert writer.closure([Requirement("root")], found, OLD) == {"root", "old", "extra", "deep"}
    assert writer.closure([Requirement("root")], found, NEW) == {"root", "arm", "extra", "deep"}
    with pytest.raises(KeyError, match="deep"):
        writer.closure([Requirement("root")], {name: one for name, one in found.items() if name != "deep"}, OLD)


def test_what_only_some_targets_need_has_a_marker_and_digests_come_together() -> None:
    of_targets = {
        OLD: dict([package("both", digest="b"), package("old")]),
        NEW: dict([package("both", digest="c")]),
        writer.Target("3.13", "x86_64"): dict([package("both", digest="c"), package("intel", digest="d")]),
    }

    text = writer.written("client", of_targets)

    assert text.splitlines()[3:] == [
        "both==1.0 \\",
        f"    --hash=sha256:{'b' * 64} \\",
        f"    --hash=sha256:{'c' * 64}",
        'intel==1.0 ; python_version == "3.13" and platform_machine == "x86_64" \\',
        f"    --hash=sha256:{'d' * 64}",
        'old==1.0 ; python_version == "3.11" \\',
        f"    --hash=sha256:{'a' * 64}",
    ]


def test_what_constraints_txt_does_not_pin_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = dict([package("httpx2", "2.0"), package("left-out", "3.0")])
    monkeypatch.setattr(writer, "direct", lambda _: [Requirement("httpx2"), Requirement("left-out")])
    monkeypatch.setattr(writer, "resolved", lambda _, __: resolved)

    with pytest.raises(writer.Unpinned, match=r"add, or mend: left-out==3\.0"):
        writer.requirements(["client"], [OLD], {"httpx2": "2.0"})


@pytest.mark.slow
def test_pip_itself_reads_a_file_and_asks_for_digests() -> None:
    """Without an index: it gets as far as looking for the first file, and no further."""
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--no-index", "--dry-run", "--isolated",
               "--ignore-installed", "-r", FOLDER / "client.txt"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert "No matching distribution found" in done.stderr
    assert "hash" not in done.stderr.lower()
