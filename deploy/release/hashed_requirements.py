"""Writes deploy/requirements: what each process installs, pinned by constraints.txt, with SHA-256 of each file.

    make requirements                                  all of them, from the index that pip is configured for
    make requirements ONLY=pool INTO=/tmp/mine         some of them, to another folder

pip resolves the extras for each Python version and processor (`pip install --dry-run --report`), and the report holds
the digests that the index gives, or that pip computed of what it fetched. Which packages a process needs on which of
these targets is then worked out here from the packages' own metadata, since pip asks markers such as
`python_version < "3.13"` of the interpreter that it runs in. A package that only some targets need gets a marker.

The names of hosts are not written: a digest is the same wherever the file comes from. PyTorch's index for CPUs has
other files than PyPI, so it makes another file of the pool's requirements.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "deploy" / "requirements"
# Which extras a process is installed with: those of its image (deploy/containers/wheels.sh), and more that it can use.
SETS: Final = {
    "gateway": ("gateway", "discovery", "redis", "tracing"),
    "edge": ("edge", "metrics", "tracing"),
    "edge-llm": ("edge", "edge-llm", "metrics", "tracing"),
    "pool": ("cloud", "announce", "metrics", "tracing"),
    "pool-llm": ("cloud-llm", "vllm", "announce", "metrics", "tracing"),
    "client": ("client",),
    "operator": ("operator",),
    "pipelines": ("text", "wasm", "images"),  # beside the edge's or the pool's
    "mdns": ("mdns",),  # beside the edge's
}
PYTHONS: Final = ("3.11", "3.12", "3.13")
MACHINES: Final = ("x86_64", "aarch64")
# The wheels of glibc 2.28 and before, newest first: pip takes platforms as it is told them, and infers no older ones.
_GLIBC: Final = (*(f"manylinux_2_{minor}" for minor in range(28, 16, -1)), "manylinux2014", "manylinux_2_12",
                 "manylinux2010", "manylinux_2_5", "manylinux1")  # fmt: skip
_MOST_ROUNDS: Final = 4


class Target(NamedTuple):
    """A Python version and a processor, on Linux with glibc."""

    python: str
    machine: str

    @property
    def marker(self) -> str:
        return f'python_version == "{self.python}" and platform_machine == "{self.machine}"'

    def environment(self, extra: str) -> dict[str, str]:
        """What markers are asked of."""
        own = {"python_version": self.python, "python_full_version": f"{self.python}.0", "platform_system": "Linux"}
        more = {"platform_machine": self.machine, "sys_platform": "linux", "os_name": "posix", "extra": extra}
        return {**default_environment(), **own, **more, "implementation_name": "cpython"}


class Package(NamedTuple):
    """One package of a target's resolution."""

    name: str
    version: str
    needs: tuple[Requirement, ...]
    digest: str


class Unpinned(Exception):
    """What is needed and not pinned; the text says the way out."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=" ".join(SETS), help="sets to write, by blanks")
    parser.add_argument("--into", type=Path, default=FOLDER)
    parser.add_argument("--machines", default=" ".join(MACHINES))
    given = parser.parse_args()
    sets = given.only.split()
    if unknown := sorted(set(sets) - set(SETS)):
        parser.error(f"no set is called {', '.join(unknown)}: {', '.join(SETS)}")
    targets = [Target(python, machine) for python in PYTHONS for machine in given.machines.split()]
    try:
        written = requirements(sets, targets, pins(ROOT / "constraints.txt"))
    except Unpinned as error:
        print(error, file=sys.stderr)
        return 1
    given.into.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        (given.into / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{given.into / f'{name}.txt'}: {text.count('==')} pins")
    return 0


def requirements(sets: Iterable[str], targets: Iterable[Target], pinned: Mapping[str, str]) -> dict[str, str]:
    """The content of each set's file. Raises Unpinned."""
    roots = {name: direct(SETS[name]) for name in sets}
    every = sorted({str(one) for of_set in roots.values() for one in of_set})
    per_set: dict[str, dict[Target, dict[str, Package]]] = {name: {} for name in roots}
    for target in targets:
        print(f"resolving for Python {target.python} on {target.machine}", flush=True)
        found = resolved(every, target)
        for name, of_set in roots.items():
            per_set[name][target] = {one: found[one] for one in closure(of_set, found, target)}
    for packages in (packages for of_targets in per_set.values() for packages in of_targets.values()):
        if free := sorted(name for name, one in packages.items() if pinned.get(name) != one.version.partition("+")[0]):
            lines = " ".join(f"{name}=={packages[name].version}" for name in free)
            raise Unpinned(f"not pinned so by constraints.txt; add, or mend: {lines}")
    return {name: written(name, of_targets) for name, of_targets in per_set.items()}


def direct(extras: Iterable[str]) -> list[Requirement]:
    """What pyproject.toml asks for with these extras, our own extras followed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]

    def of(lines: Iterable[str]) -> Iterator[Requirement]:
        for one in map(Requirement, lines):
            if one.name == "tidegate":
                for extra in sorted(one.extras):
                    yield from of(optional[extra])
            else:
                yield one

    return [*of(project["dependencies"]), *(one for extra in extras for one in of(optional[extra]))]


def pins(constraints: Path) -> dict[str, str]:
    """Versions by canonical name."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): version for name, version in pairs}


def resolved(roots: list[str], target: Target) -> dict[str, Package]:
    """Every package that is needed on a target, by name: rounds, until pip was told of what only its markers hide."""
    asked = list(roots)
    for _ in range(_MOST_ROUNDS):
        found = {one.name: one for one in ask_pip(asked, target)}
        missing = sorted({name for root in roots for name in _missing(Requirement(root), found, target)})
        if not missing:
            return found
        asked += missing
    raise Unpinned(f"pip does not resolve {', '.join(missing)} for Python {target.python} on {target.machine}")


def _missing(root: Requirement, found: Mapping[str, Package], target: Target) -> Iterator[str]:
    try:
        closure([root], found, target)
    except KeyError as error:
        yield str(error.args[0])


def closure(roots: Iterable[Requirement], found: Mapping[str, Package], target: Target) -> set[str]:
    """The names that the roots need on a target, by the packages' metadata. Raises KeyError: one was not resolved."""
    left = [(root, "") for root in roots]
    seen: set[tuple[str, str]] = set()
    while left:
        need, asked_by = left.pop()
        if need.marker is not None and not need.marker.evaluate(target.environment(asked_by)):
            continue
        name = canonicalize_name(need.name)
        if name not in found:
            raise KeyError(name)
        for extra in ("", *sorted(need.extras)):
            if (name, extra) not in seen:
                seen.add((name, extra))
                left += [(one, extra) for one in found[name].needs]
    return {name for name, _ in seen}


def ask_pip(roots: list[str], target: Target) -> list[Package]:
    """What pip would install, from wheels alone: a source distribution would be built, by what no digest holds."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted, report = Path(scratch, "wanted.txt"), Path(scratch, "report.json")
        wanted.write_text("\n".join(roots) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), "--only-binary=:all:", "--target", scratch]
        command += ["--python-version", target.python, "-c", str(ROOT / "constraints.txt"), "-r", str(wanted)]
        command += [word for glibc in _GLIBC for word in ("--platform", f"{glibc}_{target.machine}")]
        subprocess.run(command, check=True, env=os.environ | {"PIP_NO_WARN_SCRIPT_LOCATION": "1"})
        return [_package(one) for one in json.loads(report.read_text(encoding="utf-8"))["install"]]


def _package(told: dict[str, Any]) -> Package:
    metadata, archive = told["metadata"], told["download_info"]["archive_info"]
    needs = tuple(Requirement(line) for line in metadata.get("requires_dist", ()))
    return Package(canonicalize_name(metadata["name"]), metadata["version"], needs, archive["hashes"]["sha256"])


def written(name: str, of_targets: Mapping[Target, Mapping[str, Package]]) -> str:
    """The content of a set's file."""
    where: defaultdict[tuple[str, str], list[Target]] = defaultdict(list)
    digests: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for target, packages in of_targets.items():
        for one in packages.values():
            where[one.name, one.version].append(target)
            digests[one.name, one.version].add(one.digest)
    versions, machines = (" ".join(sorted(set(column))) for column in zip(*of_targets, strict=True))
    lines = [
        f"# What `tidegate[{','.join(SETS[name])}]` needs, written by `make requirements` (docs/releasing.md).",
        f"# Linux with glibc 2.28 or later; Python {versions}; {machines}.",
        f"#   pip install --require-hashes -r {name}.txt && pip install --no-deps tidegate-VERSION-py3-none-any.whl",
    ]
    for (package, version), targets in sorted(where.items()):
        lines.append(f"{package}=={version}{_marker(targets, of_targets)} \\")
        hashes = [f"    --hash=sha256:{digest}" for digest in sorted(digests[package, version])]
        lines += [f"{one} \\" for one in hashes[:-1]] + hashes[-1:]
    return "\n".join(lines) + "\n"


def _marker(targets: list[Target], every: Iterable[Target]) -> str:
    """The marker of what only some targets need; a Python version alone, where it is needed on all its processors."""
    if set(targets) == set(every):
        return ""
    whole = {one.python for one in targets} - {one.python for one in set(every) - set(targets)}
    words = [f'python_version == "{python}"' for python in sorted(whole)]
    words += [one.marker for one in targets if one.python not in whole]
    return " ; " + " or ".join(words)


if __name__ == "__main__":
    sys.exit(main())
