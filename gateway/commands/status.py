"""The command `tidegate status` shows the targets and models of a running gateway, read from its admin port.

Of a large fleet it shows one screen: targets that are not ready first, and the rest counted by state. `--all` and
`--json` show every target.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from gateway.commands.admin_reader import read_admin
from tidegate.runtime.duration import printed_duration

MOST_ROWS: Final = 40
NAMED: Final = 4
NARROW: Final = 100  # columns of a terminal
MOST_REFUSED: Final = 10
_WORST_FIRST: Final = ("down", "suspect", "ready")
_COPIED: Final = ("target", "state", "address")  # people copy these, so they are not cut
_COLOURS = {"ready": "green", "suspect": "yellow", "down": "red"}
_EXAMPLES = """
\b
Examples:
  tidegate status
  tidegate status --all | less
  tidegate status --json | jq '.targets[] | select(.state != "ready")'
  tidegate status --admin http://10.0.0.2:8003
"""


@click.command(epilog=_EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="The gateway's own JSON.")
@click.option("--all", "whole", is_flag=True, help="Every target of a large fleet, and all their names.")
@click.option(
    "--admin", default="http://127.0.0.1:8003", show_default=True, help="Address of the gateway's admin port."
)
def status(as_json: bool, whole: bool, admin: str) -> None:
    """Show what a running gateway can use: targets with state and load, models with the targets that offer them."""
    state = read_admin(admin, "/v1/state")
    if as_json:
        click.echo(json.dumps(state))
        return
    console = Console()
    targets = sorted(state["targets"], key=lambda one: _WORST_FIRST.index(one["state"]))  # a stable sort
    shown = targets if whole else targets[:MOST_ROWS]
    console.print(targets_table(shown, narrow=console.width < NARROW))
    if rest := targets[len(shown) :]:
        console.print(f"and {len(rest)} more, {_states(rest)} (--all shows them)", highlight=False)
    for words in ailments(shown):
        console.print(words, highlight=False)
    for words in ailments([{"id": one["target"], "ailing": [one]} for one in state.get("ailing", ())]):
        console.print(words, highlight=False)  # of no target; an older gateway does not send it
    for words in sandbox_lines(targets, named=None if whole else NAMED):
        console.print(words, highlight=False)
    console.print(models_table(state["models"], named=None if whole else NAMED))
    if refusal := state.get("broker_refusal"):
        console.print(f"[red]broker[/]: {escape(refusal)}", highlight=False)
    refused = state.get("refused", ())  # an older gateway does not send it
    for one in refused if whole else refused[:MOST_REFUSED]:
        console.print(f"[yellow]not dialled[/]: {escape(one['device'])}, {escape(one['reason'])}", highlight=False)
    if not whole and len(refused) > MOST_REFUSED:
        more = len(refused) - MOST_REFUSED
        console.print(f"[yellow]not dialled[/]: and {more} more (--all shows them)", highlight=False)


def _states(targets: Sequence[dict[str, Any]]) -> str:
    counts = Counter(one["state"] for one in targets)
    return ", ".join(f"{counts[state]} {state}" for state in _WORST_FIRST if counts[state])


def ailments(targets: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each condition of these targets; an older gateway does not send their evidence."""
    return [
        f"[yellow]{escape(one['id'])}[/]: {ail['condition']} for {printed_duration(ail['for_s'])}, "
        f"{escape(ail['evidence'])}"
        for one in targets
        for ail in one.get("ailing", ())
    ]


def sandbox_lines(targets: Sequence[dict[str, Any]], *, named: int | None = None) -> list[str]:
    """Return a line for each thing that workers' sandboxes lack, with the targets; one line where they lack nothing.

    Args:
        named: how many targets to name in a line; None: all.
    """
    lacking: dict[str, list[str]] = {}
    whole = untold = 0
    for one in targets:
        told = {model.get("sandbox") for model in one["models"]} - {None}  # of an older agent, or of a foreign server
        for reason in sorted(told - {""}):
            lacking.setdefault(reason, []).append(one["id"])
        whole += told == {""}
        untold += not told
    lines = []
    for reason, ids in lacking.items():
        lines.append(f"[yellow]workers not sandboxed in full[/] on {escape(_names(ids, named))}: {escape(reason)}")
    if whole:
        rest = f"; {untold} do not say" if untold else ""
        lines.append(f"workers without network and disk on {whole} of {len(targets)} targets{rest}")
    return lines


def targets_table(targets: list[dict[str, Any]], *, narrow: bool = False) -> Table:
    """Return the table of targets; `narrow` leaves out the models, as the table of models names their targets."""
    target, state, address = (Column(name, no_wrap=not narrow or name != "state") for name in _COPIED)
    load = (Column(name, no_wrap=narrow) for name in ("rtt", "queued", "in flight"))
    asked = any(one.get("attestation") for one in targets)  # an empty column is left out
    degraded = any(one.get("ails") for one in targets)
    optional = [*(["evidence"] if asked else []), *(["ails"] if degraded else [])]
    table = Table(target, state, address, "over", *optional, *([] if narrow else ["models"]), *load)
    for one in targets:
        words = [word for word in (one["reason"], _mode(one), _backlog(one)) if word]
        reason = f" ({'; '.join(words)})" if words else ""
        table.add_row(
            one["id"],
            f"[{_COLOURS[one['state']]}]{one['state']}[/]{reason}",
            one["address"],
            _over(one),
            *([_evidence(one)] if asked else []),
            *([f"[yellow]{', '.join(one.get('ails', ()))}[/]"] if degraded else []),
            *([] if narrow else [", ".join(map(_offered, one["models"]))]),
            f"{one['rtt_ms']:.1f} ms",
            str(one["queued"]),
            str(one["in_flight"]),
        )
    return table


def _over(target: dict[str, Any]) -> str:
    """Return the transport, and whether the device dialled in; an older gateway does not send the path (`road`)."""
    return f"{target['transport']}, dialled out" if target.get("road") == "dialled out" else str(target["transport"])


def _mode(target: dict[str, Any]) -> str:
    """Return which peers a device lacks in its own view; an older gateway does not send it."""
    mode = target.get("mode", "online")
    return "" if mode == "online" else str(mode).replace("-", " ")


def _backlog(target: dict[str, Any]) -> str:
    """Return how many stored items a device has still to forward."""
    kept = target.get("kept", 0)
    return f"{kept} kept for a gateway" if kept else ""


def _evidence(target: dict[str, Any]) -> str:
    words = escape(target["attestation"] or "not asked for")
    return f"[green]{words}[/]" if target["attested"] else f"none: {words}"


def _offered(model: dict[str, Any]) -> str:
    paced = " (paced: no model, it only takes the time)" if model.get("paced") else ""
    return f"{model['name']} {'/'.join(model['variants'])}{paced}"


def models_table(models: list[dict[str, Any]], *, named: int | None = None) -> Table:
    """Return the table of models.

    Args:
        named: how many targets to name for each model; None: all.
    """
    table = Table("model", "version", "ready", "offered by")
    for one in models:
        ready = "[green]yes[/]" if one["ready"] else "[red]no[/]"
        table.add_row(one["name"], one["version"], ready, _names(one["targets"], named))
    return table


def _names(names: Sequence[str], named: int | None) -> str:
    shown = names[:named]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
