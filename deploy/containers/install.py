"""Installs wheels into a virtual environment at its final place, without a network, a shell or an installed pip.

It runs in the build stage of each image, and for the archive for devices, with nothing but the standard library:

    python3 install.py WHEELS ENVIRONMENT

pip runs out of its own wheel and is not installed, so the image holds nothing that could fetch more. Modules are
compiled here, because the image's file system is read-only at run time; tests and C headers of libraries are left out.
The bill of materials (CycloneDX 1.6, JSON) lists the packages of the environment and of Debian
(`/var/lib/dpkg/status.d` or `/var/lib/dpkg/status`), and is written to ENVIRONMENT/share/sbom.cdx.json.

Invariant: the same wheels on the same base make the same files; the bill holds no time and no random number.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

# What libraries ship for those who build or test them.
LEFT_OUT: Final = (
    *("torch/include", "torch/test", "torch/share", "numpy/_core/include", "**/tests"),
    *("torch/bin/[!t]*", "torch/bin/te*"),  # all but torch_shm_manager, which an import of PyTorch looks for
)
# Modules below are imported at run time in spite of their name.
KEPT: Final = ("torch",)
Component = dict[str, Any]


def install(wheels: Path, environment: Path) -> None:
    """Make the environment, with every wheel in the folder but pip's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    pip = next(wheels.glob("pip-*.whl"))
    chosen = sorted(str(one) for one in wheels.glob("*.whl") if one != pip)
    command = [str(environment / "bin" / "python"), "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([*command, *quiet, *chosen], check=True, env=os.environ | {"PYTHONPATH": str(pip.resolve())})
    subprocess.run([str(environment / "bin" / "python"), "-m", "pip", "check"], check=True,
                   env=os.environ | {"PYTHONPATH": str(pip.resolve())})  # fmt: skip
    site = site_of(environment)
    for pattern in LEFT_OUT:
        for path in sorted(site.glob(pattern)):
            if pattern.startswith("**") and path.relative_to(site).parts[0] in KEPT:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    # Checked by content and not by time, which copying into another layer may change.
    compile_all = ["-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([str(environment / "bin" / "python"), *compile_all, str(site)], check=False)


def site_of(environment: Path) -> Path:
    return next(environment.glob("lib/python3*/site-packages"))


def bill_of_materials(site: Path, status: Path) -> dict[str, Any]:
    """The packages in `site` and those of Debian that `status` (a folder or a file) lists."""
    python = sorted((_wheel(one) for one in distributions(path=[str(site)])), key=lambda one: one["bom-ref"])
    debian = sorted((_deb(one) for one in _paragraphs(status)), key=lambda one: one["bom-ref"])
    ours = [one for one in python if one["name"] == "tidegate"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours[0]} if ours else {},
        "components": [one for one in python if one["name"] != "tidegate"] + debian,
    }


def _wheel(one: Distribution) -> Component:
    name, version = one.metadata["Name"], one.version
    address = f"pkg:pypi/{quote(name.lower().replace('_', '-'))}@{quote(version)}"
    found: Component = {"type": "library", "bom-ref": address, "name": name, "version": version, "purl": address}
    licence = one.metadata.get("License-Expression")
    return found | ({"licenses": [{"expression": licence}]} if licence else {})


def _paragraphs(status: Path) -> Iterator[dict[str, str]]:
    """The packages that Debian's files list, by their first lines of each field."""
    files = sorted(status.iterdir()) if status.is_dir() else [status] if status.exists() else []
    for file in files:
        for paragraph in file.read_text(encoding="utf-8").split("\n\n"):
            lines = [line.partition(":") for line in paragraph.splitlines() if not line.startswith(" ")]
            fields = {key: value.strip() for key, _, value in lines}
            if "Package" in fields and fields.get("Status", "installed").endswith("installed"):
                yield fields


def _deb(fields: dict[str, str]) -> Component:
    name, version, machine = fields["Package"], fields["Version"], fields.get("Architecture", "all")
    address = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={machine}"
    return {"type": "library", "bom-ref": address, "name": name, "version": version, "purl": address}


def main() -> None:
    wheels, environment = Path(sys.argv[1]), Path(sys.argv[2])
    install(wheels, environment)
    status = Path("/var/lib/dpkg/status.d")
    bill = bill_of_materials(site_of(environment), status if status.is_dir() else status.with_name("status"))
    (environment / "share").mkdir(exist_ok=True)
    (environment / "share" / "sbom.cdx.json").write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
