"""The bill of materials that `make sbom` writes: valid, and with the parts that matter in the versions that run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / ".venv-checks" / "bin" / "cyclonedx-py"


@pytest.mark.slow
@pytest.mark.skipif(not TOOL.exists(), reason="`make checks` could not set up CycloneDX here")
def test_the_bill_is_valid_and_names_what_runs(tmp_path: Path) -> None:
    bill = tmp_path / "sbom.json"

    subprocess.run(
        [TOOL, "environment", "--of", "JSON", "--sv", "1.6", "--validate", "--pyproject", ROOT / "pyproject.toml",
         "-o", bill, sys.executable],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip

    found = json.loads(bill.read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["name"] == "tidegate"
    versions = {one["name"].lower(): one["version"] for one in found["components"]}
    wanted = ("torch", "grpcio", "aiohttp", "cryptography", "onnxruntime", "numpy")
    assert {name: versions[name] for name in wanted} == {name: version(name) for name in wanted}
    assert all(one.get("purl", "").startswith("pkg:pypi/") for one in found["components"] if one["name"] in wanted)
