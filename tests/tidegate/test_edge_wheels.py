"""What an edge installs is there for aarch64 as well: every compiled package has been looked up once, by name.

The index cannot be asked in a test. So the compiled packages among all that `tidegate[edge]` pulls in are compared with
those that were found to have aarch64 wheels, with the command in docs/edge-device.md ("aarch64"); one that is new here
fails until somebody has looked.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
WITH_AARCH64_WHEELS = {
    *("aiohttp", "cffi", "cryptography", "frozenlist", "grpcio", "msgspec", "multidict", "numpy", "onnxruntime"),
    *("propcache", "protobuf", "pydantic-core", "pyyaml", "uvloop", "yarl"),
}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(one) for one in (*project["dependencies"], *project["optional-dependencies"]["edge"])]


def on_aarch64(requirement: Requirement) -> bool:
    if requirement.marker is None:
        return True
    environment = {**default_environment(), "platform_machine": "aarch64"}
    extras = requirement.extras or {""}
    return any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in extras)


def closure() -> dict[str, Distribution]:
    """Every distribution that an edge installs, by name, as installed here."""
    found: dict[str, Distribution] = {}
    waiting = wanted()
    while waiting:
        requirement = waiting.pop()
        name = normal(requirement.name)
        if name in found or not on_aarch64(requirement):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # for another Python than this one
        waiting += [Requirement(one) for one in found[name].requires or ()]
    return found


def is_compiled(one: Distribution) -> bool:
    return "Root-Is-Purelib: false" in (one.read_text("WHEEL") or "")


def test_every_compiled_package_of_an_edge_is_known_to_have_aarch64_wheels() -> None:
    compiled = {name for name, one in closure().items() if is_compiled(one)}

    unknown = compiled - WITH_AARCH64_WHEELS
    assert not unknown, f"look up aarch64 wheels of {sorted(unknown)} as docs/edge-device.md says, and add them here"
    assert {"numpy", "onnxruntime", "grpcio"} <= compiled, "the closure was found at all"


def test_every_package_of_an_edge_is_pinned() -> None:
    pinned = {normal(re.split("[=<>! ]", line)[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}

    assert not set(closure()) - pinned
