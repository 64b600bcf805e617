"""Renders the chart and checks what comes out; it runs in `.venv-checks`, where Helm's engine and the schemas are.

    {"chart": PATH, "values": {NAME: VALUES}, "versions": ["1.30", "1.37"], "others": {"kind/apiVersion": SCHEMA}}
    → {NAME: {"error": WORDS} or {"documents": [...], "complaints": [...]}, "lint": [...]}

Reads JSON on stdin and writes JSON on stdout. A resource without any schema is a complaint: nothing passes unseen.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema_rs
import kubernetes_validate
import yaml

BASE = "file:///schemas/"
SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


@cache
def registry_of(version: str) -> Any:
    """The parts that the schemas of a version refer to, read once."""
    folder = SCHEMAS / f"v{version}.0-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())
    return jsonschema_rs.Registry([(f"{BASE}_definitions.json", definitions)])


@cache
def validator_of(kind: str, api: str, version: str) -> Any:
    """The strict validator of a kind of resource; None where Kubernetes itself has no such kind."""
    flat = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api)
    path = SCHEMAS / f"v{version}.0-local-strict" / f"{kind.lower()}-{flat}.json"
    if not path.exists():
        return None
    schema = json.loads(path.read_text())
    return jsonschema_rs.Draft202012Validator(schema, registry=registry_of(version), base_uri=BASE)


def complaints(documents: list[Any], versions: list[str], others: dict[str, Any]) -> list[str]:
    found = []
    for document in documents:
        kind, api = document["kind"], document["apiVersion"]
        name = f"{kind}/{document['metadata']['name']}"
        own = others.get(f"{kind}/{api}")
        for version in versions:
            validator = jsonschema_rs.Draft202012Validator(own) if own else validator_of(kind, api, version)
            if validator is None:
                found.append(f"{name}: there is no schema of {kind} in {api} ({version})")
                continue
            errors = validator.iter_errors(document)
            found += [f"{name} ({version}): {one.instance_path}: {one.message[:300]}" for one in errors]
    return found


def documents_of(manifests: dict[str, str]) -> list[Any]:
    texts = [text for path, text in sorted(manifests.items()) if path.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def rendered(chart: Any, values: Any, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        chart.validate_schema(values)
        manifests = chart.render(values, name="edge", namespace="prod")
    except helm_python.HelmError as error:
        return {"error": str(error)}
    documents = documents_of(manifests)
    return {"documents": documents, "complaints": complaints(documents, asked["versions"], asked["others"])}


def main() -> None:
    asked = json.load(sys.stdin)
    with helm_python.Chart.load(asked["chart"]) as chart:
        answer = {name: rendered(chart, values, asked) for name, values in asked["values"].items()}
    first = next(iter(asked["values"].values()))
    report = helm_python.lint(asked["chart"], first, strict=True)
    answer["lint"] = [one for one in report["messages"] if one["severity"] >= 2] + report["errors"]
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
