"""`tidegate operator` runs the Kubernetes operator, prints its CustomResourceDefinitions, and renders resources."""

from __future__ import annotations

import asyncio
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import click
import yaml

from tidegate.config import ConfigError
from tidegate.runtime.duration import Duration
from tidegate.runtime.logs import configure_logging
from tidegate.runtime.process import until_signal
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.servers.cluster_access import api_address, own_environment
from tidegate.storage.bounded_yaml import TooMuch, compose, construct
from tidegate.tools.operator.definitions import API_VERSION, KIND_OF, KINDS, definition
from tidegate.tools.operator.rendering.objects import as_yaml
from tidegate.tools.operator.rendering.render import render as rendered
from tidegate.tools.operator.resource import CustomResource, Refused


@click.group(cls=SuggestingGroup)
def operator() -> None:
    """Run gateways, pools and edge agents from custom resources of Kubernetes."""


@operator.command()
def crds() -> None:
    """Print the CustomResourceDefinitions of this version.

    \b
    Example:  tidegate operator crds | kubectl apply --server-side -f -
    """
    for kind in KINDS:
        click.echo("---\n" + definition_yaml(kind.name), nl=False)


def definition_yaml(kind: str) -> str:
    return as_yaml(definition(KIND_OF[kind]), sort_keys=False)


@operator.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--namespace", default="default", show_default=True, help="Of resources that name none.")
def render(files: tuple[Path, ...], namespace: str) -> None:
    """Print the objects that the resources in FILES become; asks no cluster.

    \b
    Examples:
      tidegate operator render site.yaml
      tidegate operator render models.yaml pool.yaml gateway.yaml | kubectl diff --server-side -f -
    """
    known = {one.key: one for path in files for one in _resources(path, namespace)}
    if not known:
        raise click.ClickException(f"there are no resources of {API_VERSION} in {', '.join(map(str, files))}")
    for resource in known.values():
        try:
            made = rendered(resource, known)
        except Refused as error:
            raise click.ClickException(f"{resource.key}: {error.reason}: {error}") from error
        for condition in made.conditions:
            if condition.message:
                click.echo(f"{resource.key}: {condition.reason}: {condition.message}", err=True)
        for one in made.objects:
            click.echo("---\n" + as_yaml(one, sort_keys=False), nl=False)


def _resources(path: Path, namespace: str) -> list[CustomResource]:
    found = []
    for text in path.read_text(encoding="utf-8").split("\n---"):
        try:
            node = compose(text)
            body = None if node is None else construct(node)
        except (yaml.YAMLError, TooMuch) as error:
            raise click.ClickException(f"{path}: is not valid YAML: {error}") from error
        if isinstance(body, dict) and body.get("apiVersion") == API_VERSION and body.get("kind") in KIND_OF:
            named = body.get("metadata")
            if not isinstance(named, dict) or not isinstance(named.get("name"), str):
                raise click.ClickException(f"{path}: a {body['kind']} has no metadata.name")
            meta = {"namespace": namespace, **named}
            found.append(CustomResource.of(body["kind"], {**body, "metadata": meta}))
    return found


def _conductors(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    if wrong := [name for name, _, url in pairs if not name or not url.startswith(("http://", "https://"))]:
        raise click.BadParameter(f"{wrong[0]!r}: NAME=URL is meant, as in main=https://gateway-admin.prod.svc:8003")
    return {name: url for name, _, url in pairs}


@operator.command()
@click.option("--namespace", "namespaces", multiple=True, help="Whose resources; several times. Default: its own.")
@click.option("--all-namespaces", is_flag=True, help="Resources of the whole cluster; needs the rights there.")
@click.option("--server", help="The API server, such as that of `kubectl proxy`; in a pod it is known.")
@click.option("--own-namespace", help="Where its lease is; in a pod it is the pod's.")
@click.option("--token-file", type=click.Path(path_type=Path), help="In a pod: its service account's.")
@click.option("--ca-file", type=click.Path(path_type=Path), help="In a pod: its service account's.")
@click.option(
    "--identity", default="", envvar="TIDEGATE_OPERATOR_IDENTITY", help="Default: this host's name, and a number."
)
@click.option("--conductor", "conductors", multiple=True, callback=_conductors, metavar="NAME=URL",
              help="Admin port of a gateway that conducts rollouts; the key is in TIDEGATE_API_KEY.")  # fmt: skip
@click.option("--lease", "lease_s", type=Duration(bare="s", min_s=1, max_s=300), default="15s", show_default=True,
              help="How long another operator waits for this one.")  # fmt: skip
@click.option("--liveness", metavar="URL", help="Where it says that it lives, as in http://0.0.0.0:8080/healthz.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def run(namespaces: tuple[str, ...], all_namespaces: bool, **given: Any) -> None:
    """Make the cluster as its resources say, until a signal. Several may run: one of them acts.

    \b
    Examples:
      tidegate operator run
      kubectl proxy --port 8009 & tidegate operator run --server http://127.0.0.1:8009 --own-namespace prod
    """
    from tidegate.tools.operator.app import operate  # kopf, which the other commands do not need

    if namespaces and all_namespaces:
        raise click.UsageError("--namespace or --all-namespaces, not both")
    identity = given["identity"] or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    try:
        address = api_address(
            given["server"], given["own_namespace"], given["token_file"], given["ca_file"], own_environment()
        )
    except ConfigError as error:
        words = str(error).replace("set server", "set --server").replace("the key namespace", "--own-namespace")
        click.echo(f"the operator cannot start: {words}", err=True)
        sys.exit(1)
    configure_logging(f"operator {identity}", level=given["log_level"], form=given["log_format"])
    chosen = () if all_namespaces else namespaces or (address.namespace,)
    serving = operate(
        address, namespaces=chosen, identity=identity, conductors=given["conductors"], liveness=given["liveness"],
        lease_s=given["lease_s"],
    )  # fmt: skip
    asyncio.run(until_signal(serving))
