"""The chart rendered by every example of `deploy/helm/examples` and by values of a test, in one process of Helm's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

ROOT: Final = Path(__file__).parents[3]
CHART: Final = ROOT / "deploy" / "helm" / "tidegate"
EXAMPLES: Final = {path.stem: path for path in sorted((ROOT / "deploy" / "helm" / "examples").glob("*.yaml"))}
CHECKS: Final = ROOT / ".venv-checks" / "bin" / "python"
VERSIONS: Final = ("1.30", "1.37")  # the oldest that the chart allows, and the newest that there are schemas of
FOREIGN: Final[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "foreign.yaml").read_text())
_TIMEOUT_S: Final = 200


class Rendered(NamedTuple):
    """What one set of values makes: Helm's refusal, or documents and what is wrong with them."""

    error: str
    documents: list[dict[str, Any]]
    complaints: list[str]

    def one(self, kind: str, part: str) -> dict[str, Any]:
        """The only document of a kind whose name ends so."""
        found = [one for one in self.documents if one["kind"] == kind and one["metadata"]["name"].endswith(part)]
        assert len(found) == 1, f"{kind} {part}: {[one['metadata']['name'] for one in found]}"
        return found[0]

    def configuration(self, part: str) -> dict[str, Any]:
        """The configuration that the gateway or the pool would be started with."""
        files = list(self.one("ConfigMap", part)["data"].values())
        assert len(files) == 1
        found: dict[str, Any] = yaml.safe_load(files[0])
        return found


def has_helm() -> bool:
    """Whether Helm's engine could be set up here."""
    wanted = ("helm_python", "kubernetes_validate", "jsonschema_rs")
    return all(any(CHECKS.parents[1].glob(f"lib/python3*/site-packages/{one}")) for one in wanted)


def render(values: dict[str, Any], chart: Path = CHART) -> tuple[dict[str, Rendered], list[Any]]:
    """Each set of values by its name, and what `helm lint --strict` says of the chart with the first set."""
    script = Path(__file__).parent / "outside.py"
    asked = {"chart": str(chart), "values": values, "versions": VERSIONS, "others": FOREIGN}
    done = subprocess.run(
        [CHECKS, script], input=json.dumps(asked), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    lint = answer.pop("lint")
    return {
        name: Rendered(one.get("error", ""), one.get("documents", []), one.get("complaints", []))
        for name, one in answer.items()
    }, lint


def complaints_about(documents: list[dict[str, Any]]) -> list[str]:
    """What Kubernetes' schemas, and ours of others' resources, have against documents."""
    program = (
        "import json, sys; from outside import complaints; asked = json.load(sys.stdin);"
        "json.dump(complaints(*asked), sys.stdout)"
    )
    done = subprocess.run(
        [CHECKS, "-c", program], input=json.dumps([documents, VERSIONS, FOREIGN]), capture_output=True, text=True,
        timeout=_TIMEOUT_S, check=True, cwd=Path(__file__).parent,
    )  # fmt: skip
    found: list[str] = json.loads(done.stdout)
    return found
