"""`tidegate edge store` shows what a device keeps for gateways, and manages its dead letters.

It runs in the device's own shell. It opens the store's file itself, so it works while the agent runs and while it does
not; SQLite keeps the two apart.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from edge_agent.config import EdgeConfig
from edge_agent.offline.queue_db import SCHEMA, OfflineLedger
from edge_agent.offline.store import FILE_NAME
from tidegate.config import load
from tidegate.runtime.plain_text import plain
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.storage.database import connect, transact

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")
MOST_LISTED = 100  # dead letters in a table

_EXAMPLES = """
\b
Examples:
  tidegate edge --config edge.yaml store list
  tidegate edge --config edge.yaml store show 3f9a0c11d2e4a8b70c11d2e43f9a0c11
  tidegate edge --config edge.yaml store retry --all
  TIDEGATE_EDGE_STATE_DIR=/var/lib/tidegate tidegate edge store list --json
"""


@click.group(cls=SuggestingGroup, epilog=_EXAMPLES)
def store() -> None:
    """What this device keeps for gateways, and the letters that none would take."""


@store.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with the counters.")
@click.pass_context
def list_(ctx: click.Context, as_json: bool) -> None:
    """How full the store is, and its dead letters: what gateways refused five times, or for good.

    \b
    Examples:
      tidegate edge --config edge.yaml store list
      tidegate edge --config edge.yaml store list --json | jq .dead_letters
    """
    with _opened(ctx) as db:
        ledger = _ledger(ctx)
        usage, dead = ledger.usage(db), [_letter(row) for row in ledger.dead(db, -1 if as_json else MOST_LISTED)]
    if as_json:
        click.echo(json.dumps({**msgspec.to_builtins(usage), "dead_letters": dead}))
        return
    # Here and not at the top: an agent that starts imports its commands, and rich is a tenth of that.
    from rich.console import Console

    console = Console()
    tickets = ", ".join(f"{count} {state}" for state, count in sorted(usage.tickets.items())) or "none"
    console.print(
        f"{usage.waiting} wait to be sent, {usage.dead} are dead letters; tickets: {tickets}; "
        f"{usage.bytes} of {ledger.max_bytes} bytes, {usage.rows} of {ledger.max_rows} rows",
        highlight=False,
    )
    for reason, count in sorted(usage.counters.items()):
        console.print(f"{reason.replace('_', ' ')}: {count}", highlight=False)
    if dead:
        console.print(_table(dead))
    if len(dead) < usage.dead:
        console.print(f"these are the oldest {len(dead)} of {usage.dead}; --json names all", highlight=False)


@store.command()
@click.argument("id")
@click.pass_context
def show(ctx: click.Context, id: str) -> None:
    """Everything that is known of one dead letter or ticket, as JSON.

    \b
    Example:
      tidegate edge --config edge.yaml store show 3f9a0c11d2e4a8b70c11d2e43f9a0c11
    """
    with _opened(ctx) as db:
        row = db.execute("SELECT * FROM entries WHERE id = ?", (id,)).fetchone()
        ticket = _ledger(ctx).ticket(db, id)
    if row is None and ticket is None:
        raise click.ClickException(f"nothing here is called {id!r}; `tidegate edge store list` shows what is")
    told: dict[str, Any] = {} if row is None else {**_letter(row), "state": row["state"], "bytes": row["bytes"]}
    if ticket is not None:
        told["ticket"] = {"state": ticket.state, "code": ticket.code, "why": ticket.why}
    click.echo(json.dumps(told, indent=2))


@store.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All dead letters.")
@click.pass_context
def retry(ctx: click.Context, ids: tuple[str, ...], every: bool) -> None:
    """Send dead letters again, with five tries each; their tickets are open again.

    \b
    Example:
      tidegate edge --config edge.yaml store retry --all
    """
    _each(ctx, ids, every, "to be sent again", lambda ledger, db, chosen: ledger.retry(db, chosen))


@store.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All dead letters.")
@click.pass_context
def drop(ctx: click.Context, ids: tuple[str, ...], every: bool) -> None:
    """Delete dead letters for good; their tickets keep saying why they failed.

    \b
    Example:
      tidegate edge --config edge.yaml store drop 3f9a0c11d2e4a8b70c11d2e43f9a0c11
    """
    _each(ctx, ids, every, "dropped", lambda ledger, db, chosen: ledger.drop(db, chosen))


def _each(
    ctx: click.Context,
    ids: tuple[str, ...],
    every: bool,
    done: str,
    work: Callable[[OfflineLedger, sqlite3.Connection, frozenset[str] | None], int],
) -> None:
    if bool(ids) == every:
        raise click.UsageError("name dead letters by id, or take --all")
    with _opened(ctx) as db:
        count = transact(db, lambda one: work(_ledger(ctx), one, None if every else frozenset(ids)))
    if ids and count < len(set(ids)):
        raise click.ClickException(f"{count} {done}; the others are no dead letters here")
    click.echo(f"{count} {done}")


def _config(ctx: click.Context) -> EdgeConfig:
    return load(EdgeConfig, ctx.find_object(Path))


def _ledger(ctx: click.Context) -> OfflineLedger:
    bounds = _config(ctx).store
    if bounds is None:
        raise click.ClickException("this device keeps nothing: key 'store' is null")
    return OfflineLedger(max_bytes=bounds.max_bytes, max_rows=bounds.max_rows)


@contextmanager
def _opened(ctx: click.Context) -> Iterator[sqlite3.Connection]:
    config = _config(ctx)
    path = config.state_dir / FILE_NAME
    if not path.exists():
        if config.mqtt is None:
            raise click.ClickException(f"there is no {path}: a device without a broker (key 'mqtt') keeps nothing")
        raise click.ClickException(f"there is no {path}; name the agent's configuration: tidegate edge --config FILE")
    try:
        with closing(connect(path, SCHEMA)) as db:
            yield db
    except (sqlite3.Error, OSError) as error:  # also what the disk refuses later: nothing was changed
        raise click.ClickException(f"{path}: {error}") from error


def _letter(row: sqlite3.Row) -> dict[str, Any]:
    return {name: row[name] for name in ("id", "kind", "model", "priority", "attempts", "why")}


def _table(dead: list[dict[str, Any]]) -> Table:
    from rich.table import Column, Table

    table = Table(Column("dead letter", no_wrap=True), "kind", "model", "tries", "why")
    for one in dead:
        table.add_row(one["id"], one["kind"], plain(one["model"]), str(one["attempts"]), plain(one["why"]))
    return table
