"""The bill of materials that `make sbom` writes: valid, and with the parts that matter in the versions that run.

`make sbom` lets CycloneDX validate the bill, which takes half a minute for its hundreds of addresses: its grammar of
IRIs is a slow one. The same schema, formats included, is held against it here by jsonschema-rs, at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = ROOT / ".venv-checks" / "bin"
TOOL = CHECKS / "cyclonedx-py"
# Prints what is wrong with each bill of a JSON list, by CycloneDX's own schema.
VALIDATE = """
import json, sys
from pathlib import Path
import cyclonedx.schema, jsonschema_rs
folder = Path(cyclonedx.schema.__file__).parent
files = {path.name: json.loads(path.read_text()) for path in folder.rglob("*.schema.json")}
schema = files["bom-1.6.SNAPSHOT.schema.json"]
home = schema["$id"].rpartition("/")[0]
others = [(f"{home}/{name}", one) for name, one in files.items() if not name.startswith("bom-")]
validator = jsonschema_rs.validator_for(schema, registry=jsonschema_rs.Registry(others), validate_formats=True)
json.dump([[error.message for error in validator.iter_errors(bill)] for bill in json.load(sys.stdin)], sys.stdout)
"""


def complaints(*bills: Any) -> list[list[str]]:
    """What is wrong with each."""
    command = [CHECKS / "python", "-c", VALIDATE]
    done = subprocess.run(command, input=json.dumps(bills), capture_output=True, text=True, timeout=100, check=True)
    found: list[list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not TOOL.exists(), reason="`make checks` could not set up CycloneDX here")
def test_the_bill_is_valid_and_names_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "sbom.json"

    subprocess.run(
        [TOOL, "environment", "--of", "JSON", "--sv", "1.6", "--no-validate", "--pyproject", ROOT / "pyproject.toml",
         "-o", path, sys.executable],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip

    bill = json.loads(path.read_text())
    no_kind = bill | {"components": [bill["components"][0] | {"type": "nonsense"}]}
    no_address = bill | {"externalReferences": [{"type": "website", "url": "no <address>"}]}
    valid, *wrong = complaints(bill, no_kind, no_address)
    assert not valid
    assert all(wrong), "the schema is held against it"
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "tidegate"
    versions = {one["name"].lower(): one["version"] for one in bill["components"]}
    wanted = ("torch", "grpcio", "aiohttp", "cryptography", "onnxruntime", "numpy")
    assert {name: versions[name] for name in wanted} == {name: version(name) for name in wanted}
    assert all(one.get("purl", "").startswith("pkg:pypi/") for one in bill["components"] if one["name"] in wanted)
