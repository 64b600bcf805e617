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
from rich.table import Column, Table

from gateway.commands.admin_reader import read_admin
from tidegate.admin_client import admin_option
from tidegate.runtime.duration import printed_duration
from tidegate.runtime.plain_text import plain

MOST_ROWS: Final = 40
NAMED: Final = 4
NARROW: Final = 100  # columns of a terminal
MOST_REFUSED: Final = 10
SILENT_PEER_S: Final = 5.0  # without a word of what is asked of it; some brokers let gateways not write to `peer/`
_WORST_FIRST: Final = ("down", "suspect", "ready")
LONGEST_REASON: Final = 40  # on one line of the table
_COPIED: Final = ("target", "state", "address")  # people copy these, so they are not cut
_COLOURS = {"ready": "green", "suspect": "yellow", "down": "red"}
_GRADES: Final = {
    "ids": "token ids (grade T)",
    "prefill": "text that it can go on with (grade P)",
    "text": "text only (grade X)",
}
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
@admin_option
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
    for words in source_lines(state.get("sources", ())):  # an older gateway does not send them
        console.print(words, highlight=False)
    for words in gateway_lines(state.get("gateways", {})):
        console.print(words, highlight=False)
    for words in worker_lines(state.get("workers", ())):
        console.print(words, highlight=False)
    for words in cache_lines(state.get("cache", ())):
        console.print(words, highlight=False)
    for words in configuration_lines(state.get("configuration", {})):  # an older gateway does not send it
        console.print(words, highlight=False)
    for words in ailments(shown):
        console.print(words, highlight=False)
    for words in ailments([{"id": one["target"], "ailing": [one]} for one in state.get("ailing", ())]):
        console.print(words, highlight=False)  # of no target; an older gateway does not send it
    for words in upstream_lines(shown):
        console.print(words, highlight=False)
    for words in sandbox_lines(targets, named=None if whole else NAMED):
        console.print(words, highlight=False)
    console.print(models_table(state["models"], named=None if whole else NAMED))
    if refusal := state.get("broker_refusal"):
        console.print(f"[red]broker[/]: {plain(refusal)}", highlight=False)
    refused = state.get("refused", ())  # an older gateway does not send it
    for one in refused if whole else refused[:MOST_REFUSED]:
        console.print(f"[yellow]not dialled[/]: {plain(one['device'])}, {plain(one['reason'])}", highlight=False)
    if not whole and len(refused) > MOST_REFUSED:
        more = len(refused) - MOST_REFUSED
        console.print(f"[yellow]not dialled[/]: and {more} more (--all shows them)", highlight=False)


def _states(targets: Sequence[dict[str, Any]]) -> str:
    counts = Counter(one["state"] for one in targets)
    return ", ".join(f"{counts[state]} {state}" for state in _WORST_FIRST if counts[state])


def source_lines(sources: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each source of targets but the gateway's own list: what it says, and when it was heard."""
    lines = []
    for one in sources:
        heard = one["heard_s_ago"]
        when = "not heard yet" if heard is None else f"heard {printed_duration(heard)} ago"
        trouble = one["away"] or one["warning"]
        after = f"; [yellow]{'away' if one['away'] else 'partly unusable'}[/]: {plain(trouble)}" if trouble else ""
        lines.append(f"source {plain(one['name'])}: {one['targets']} targets, {when}{after}")
    return lines


def gateway_lines(gateways: dict[str, Any]) -> list[str]:
    """Return a line that names the gateways beside this one, where there are any, and one of a name given twice."""
    namesake = "[red]gateways[/]: another one has this one's name, and each ends the other's session with the broker"
    lines = [f"{namesake}: change `name` of one"] if gateways.get("has_namesake") else []
    others = gateways.get("others", ())  # an older gateway does not send it
    if gateways.get("count", 1) == 1:
        return lines
    silent = [one["name"] for one in others if one["said_s_ago"] is None or one["said_s_ago"] > SILENT_PEER_S]
    names = ", ".join(one["name"] for one in others) or "the others are not seen"
    line = f"gateways: {gateways['count']}, quotas are shared with {plain(names)}"
    if silent:
        line += f"; [yellow]silent[/]: {plain(', '.join(silent))}, so each has its equal part"
    return [*lines, line]


def worker_lines(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line of the gateway's processes, where there are several, and one of each that is down or has died."""
    if not workers:
        return []
    words = []
    for one in workers:
        held = f", {one['in_flight']} in flight, {one['connections']} connections" if "in_flight" in one else ""
        state = "" if one["state"] == "ready" else f" [yellow]{one['state']}[/]"
        words.append(f"{one['name']} (pid {one['pid']}){state}{held}")
    lines = [f"processes: {'; '.join(words)}"]
    for one in workers:
        if one["ended"]:
            times = "once" if one["ended"] == 1 else f"{one['ended']} times"
            lines.append(f"[yellow]{one['name']}[/] ended {times} and was started again: {plain(one['why'])}")
    return lines


def cache_lines(models: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each model whose answers are kept: how many requests they answered, and what they take."""
    return [
        f"known answers of {plain(one['model'])}: {one['kept']} in {one['bytes'] / 2**20:.1f} MiB, "
        f"{one['hits']} of {one['lookups']} requests answered"
        for one in models
    ]


def configuration_lines(configuration: dict[str, Any]) -> list[str]:
    """Return a line of how many devices have the settings that are desired of them, where some are."""
    counts = {state: count for state, count in configuration.get("devices", {}).items() if count}
    if not counts:
        return []
    words = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in counts.items())
    return [f"settings of devices: {words} (`tidegate fleet configuration` shows each)"]


def ailments(targets: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each condition of these targets; an older gateway does not send their evidence."""
    return [
        f"[yellow]{plain(one['id'])}[/]: {ail['condition']} for {printed_duration(ail['for_s'])}, "
        f"{plain(ail['evidence'])}"
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
        lines.append(f"[yellow]workers not sandboxed in full[/] on {plain(_names(ids, named))}: {plain(reason)}")
    if whole:
        rest = f"; {untold} do not say" if untold else ""
        lines.append(f"workers without network and disk on {whole} of {len(targets)} targets{rest}")
    return lines


def upstream_lines(targets: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each model that a server of another maker serves: what it takes, and why that is all."""
    return [
        f"{plain(one['id'])}: {plain(model['name'])} by {_GRADES.get(grade, grade)}, {plain(model['upstream'])}"
        for one in targets
        for model in one["models"]
        if model.get("upstream")  # an older gateway does not send it
        for grade in sorted(set(model["grades"].values()))
    ]


def targets_table(targets: list[dict[str, Any]], *, narrow: bool = False) -> Table:
    """Return the table of targets; `narrow` leaves out the models, as the table of models names their targets."""
    wordy = narrow or any(len(one["reason"]) > LONGEST_REASON for one in targets)  # it would push the others out
    target, state, address = (Column(name, no_wrap=not wordy or name != "state") for name in _COPIED)
    load = (Column(name, no_wrap=narrow) for name in ("rtt", "queued", "in flight"))
    asked = any(one.get("attestation") for one in targets)  # an empty column is left out
    degraded = any(one.get("ails") for one in targets)
    found = any(one.get("source", "static") not in ("static", "mqtt") for one in targets)
    optional = [*(["from"] if found else []), *(["evidence"] if asked else []), *(["ails"] if degraded else [])]
    table = Table(target, state, address, "over", *optional, *([] if narrow else ["models"]), *load)
    for one in targets:
        words = [word for word in (one["reason"], _mode(one), _backlog(one)) if word]
        reason = plain(f" ({'; '.join(words)})") if words else ""  # a device may say what it likes
        table.add_row(
            plain(one["id"]),
            f"[{_COLOURS[one['state']]}]{one['state']}[/]{reason}",
            plain(one["address"]),  # an IPv6 address is in brackets
            _over(one),
            *([plain(one.get("source", ""))] if found else []),
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
    words = plain(target["attestation"] or "not asked for")
    return f"[green]{words}[/]" if target["attested"] else f"none: {words}"


def _offered(model: dict[str, Any]) -> str:
    paced = " (paced: no model, it only takes the time)" if model.get("paced") else ""
    return plain(f"{model['name']} {'/'.join(model['variants'])}{paced}")


def models_table(models: list[dict[str, Any]], *, named: int | None = None) -> Table:
    """Return the table of models.

    Args:
        named: how many targets to name for each model; None: all.
    """
    table = Table("model", "version", "ready", "offered by")
    for one in models:
        ready = "[green]yes[/]" if one["ready"] else "[red]no[/]"
        table.add_row(plain(one["name"]), plain(one["version"]), ready, _names(one["targets"], named))
    return table


def _names(names: Sequence[str], named: int | None) -> str:
    shown = names[:named]
    more = len(names) - len(shown)
    return plain(", ".join(shown)) + (f" and {more} more" if more else "")
