"""The operator's commands that ask no cluster: definitions, and what resources become."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tidegate.tools.operator.cli import operator

EXAMPLES = Path(__file__).parents[4] / "deploy" / "operator" / "examples"
HEAD = "apiVersion: tidegate.dev/v1alpha1\nkind: TidegateGateway\n"


@pytest.mark.slow
def test_definitions_are_printed_one_after_another() -> None:
    said = CliRunner().invoke(operator, ["crds"])

    assert said.exit_code == 0
    assert [one["kind"] for one in yaml.safe_load_all(said.output)] == ["CustomResourceDefinition"] * 5


def test_resources_of_several_files_know_each_other(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(f"{HEAD}metadata: {{name: main}}\nspec: {{models: [digits-1]}}\n")
    files = [str(tmp_path / "gateway.yaml"), str(EXAMPLES / "model.yaml")]

    said = CliRunner().invoke(operator, ["render", "--namespace", "prod", *files])
    alone = CliRunner().invoke(operator, ["render", files[0]])

    made = list(yaml.safe_load_all(said.output))
    assert {one["kind"] for one in made} >= {"ConfigMap", "Deployment", "Service"}
    assert {one["metadata"]["namespace"] for one in made} == {"prod"}
    assert (alone.exit_code, "digits-1" in alone.output) == (1, True)


@pytest.mark.slow
def test_what_was_left_out_is_said_beside_what_was_made(tmp_path: Path) -> None:
    gateway = (
        f"{HEAD}metadata: {{name: main}}\nspec: {{modelsVolume: {{emptyDir: {{}}}}, config: {{metrics_port: 0}}}}\n"
    )
    pool = gateway.replace("Gateway", "Pool").replace(
        "config: {metrics_port: 0}", "autoscaling: {kind: keda, gateway: main}"
    )
    (tmp_path / "site.yaml").write_text(f"{gateway}---\n{pool}")

    said = CliRunner().invoke(operator, ["render", str(tmp_path / "site.yaml")])

    assert (said.exit_code, "NoMetrics" in said.stderr, "metrics_port" in said.stderr) == (0, True, True), said.output
    kinds = {one["kind"] for one in yaml.safe_load_all(said.stdout)}
    assert "StatefulSet" in kinds and "ScaledObject" not in kinds


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kind: Pod\n", "no resources of tidegate.dev"),
        (f"{HEAD}spec: {{}}\n", "no metadata.name"),
        (f"{HEAD}metadata: {{name: a}}\nspec: {{models: abc}}\n", "models"),
        (f"{HEAD}metadata: {{name: a}}\nspec: {{replica: 1}}\n", "did you mean 'replicas'"),
        (f"{HEAD}metadata: {{name: a}}\nspec: {{config: {{http_prot: 1}}}}\n", "did you mean 'http_port'"),
        ("a: [\n", "not valid YAML"),
        (f"{HEAD}metadata: &x {{name: a, b: *x}}\n", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "wrong.yaml").write_text(text)

    said = CliRunner().invoke(operator, ["render", str(tmp_path / "wrong.yaml")])

    assert (said.exit_code, word in said.output) == (1, True), said.output
    assert "Traceback" not in said.output


@pytest.mark.parametrize("given", ["main", "=https://x", "main=ftp://x"])
def test_a_conductor_has_a_name_and_an_address(given: str) -> None:
    said = CliRunner().invoke(operator, ["run", "--conductor", given])

    assert (said.exit_code, "NAME=URL" in said.output) == (2, True)


@pytest.mark.slow
def test_outside_of_a_cluster_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    said = CliRunner().invoke(operator, ["run"])

    assert (said.exit_code, "--server" in said.output) == (1, True)
