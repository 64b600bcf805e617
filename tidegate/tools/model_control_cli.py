"""The commands `load`, `unload` and `index` of models change what a gateway, pool or device serves, and show it.

Without `--at` they speak to a gateway's admin port; with it to the gRPC port of a pool or a device, which is where
workers start and end. The operator's token is found by the port, for the account that runs the process and for root.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import click

from tidegate.admin_client import Admin, admin_option
from tidegate.outcome import ServeError
from tidegate.servers.operator_token import token_for

if TYPE_CHECKING:
    from tidegate.oip.grpc.control_client import ControlClient

_WITHIN_S: Final = 300.0  # a large model may take minutes
_FOLDER: Final = "/v2/repository"

at_option = click.option(
    "--at", metavar="HOST:PORT", envvar="TIDEGATE_AT", help="The gRPC port of a pool or a device, instead of a gateway."
)
_PEM: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


def tls_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, words in (
        ("--key", "Its private key, PEM."),
        ("--cert", "The certificate to show there, PEM: of a gateway, where it asks for one."),
        ("--ca", "The CA that has signed its certificate, PEM, where it is encrypted."),
    ):
        command = click.option(name, type=_PEM, help=f"{words} With --at.")(command)
    return command


@click.command()
@click.argument("name")
@at_option
@tls_options
@admin_option
def load(name: str, at: str | None, admin: str, **pem: Path | None) -> None:
    """Serve a model from now on, in the highest version that the repository has.

    A pool or a device needs `model_control: explicit`. It answers once the model is warm, and another version of it
    serves until then. At a gateway it takes back an unload.

    \b
    Examples:
      tidegate model load minilm --at 127.0.0.1:8101
      tidegate model load minilm
    """
    if at is None:
        Admin(admin, within_s=_WITHIN_S).ask(f"{_FOLDER}/models/{quote(name, safe='')}/load", method="POST", body=b"")
    else:
        with _client(at, pem) as client:
            client.load(name)
    click.echo(f"{name} is loaded")


@click.command()
@click.argument("name")
@at_option
@tls_options
@admin_option
def unload(name: str, at: str | None, admin: str, **pem: Path | None) -> None:
    """Serve a model no longer: what was accepted is answered, new requests are refused.

    A pool or a device (`model_control: explicit`) gives its memory back, and requests go to targets that still have
    it. At a gateway no target gets the model's requests any more, until it is loaded again there.

    \b
    Examples:
      tidegate model unload minilm --at 127.0.0.1:8101
      tidegate model unload minilm
    """
    if at is None:
        Admin(admin, within_s=_WITHIN_S).ask(f"{_FOLDER}/models/{quote(name, safe='')}/unload", method="POST", body=b"")
    else:
        with _client(at, pem) as client:
            client.unload(name)
    click.echo(f"{name} is unloaded")


@click.command()
@at_option
@tls_options
@admin_option
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def index(at: str | None, admin: str, as_json: bool, **pem: Path | None) -> None:
    """List the models of a repository with their states, and why one is not ready.

    \b
    Examples:
      tidegate model index
      tidegate model index --at 127.0.0.1:8101 --json
    """
    entries = _index(at, admin, pem)
    if as_json:
        click.echo(json.dumps(entries))
        return
    rows = [(one["name"], one["version"], one["state"], one["reason"]) for one in entries]
    click.echo("\n".join(_table([("MODEL", "VERSION", "STATE", "REASON"), *rows])))


COMMANDS: Final = (load, unload, index)


def _index(at: str | None, admin: str, pem: dict[str, Path | None]) -> list[dict[str, Any]]:
    if at is None:
        body, _ = Admin(admin).ask(f"{_FOLDER}/index")
        found: list[dict[str, Any]] = json.loads(body)
        return found
    with _client(at, pem) as client:
        return [one._asdict() for one in client.index()]


@contextmanager
def _client(at: str, pem: dict[str, Path | None]) -> Iterator[ControlClient]:
    from tidegate.oip.grpc.control_client import ControlClient  # grpc takes a while to import

    try:
        token = token_for(f"http://{at}") or ""
    except (OSError, ValueError) as error:
        raise click.ClickException(f"the operator's token cannot be read: {error}") from error
    try:
        with ControlClient(at, token=token, credentials=_credentials(pem), within_s=_WITHIN_S) as client:
            yield client
    except ServeError as error:
        raise click.ClickException(error.message) from error


def _credentials(pem: dict[str, Path | None]) -> Any:
    import grpc

    ca, cert, key = (None if path is None else path.read_bytes() for path in (pem["ca"], pem["cert"], pem["key"]))
    if ca is None and cert is None and key is None:
        return None
    return grpc.ssl_channel_credentials(ca, key, cert)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
