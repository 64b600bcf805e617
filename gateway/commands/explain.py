"""The command `tidegate explain` shows why a running gateway sent requests where it did."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import urlencode

import click
from rich.console import Console
from rich.table import Column, Table

from gateway.commands.admin_reader import read_admin
from gateway.commands.waterfall_view import print_waterfall
from tidegate.admin_client import admin_option
from tidegate.runtime.duration import printed_duration
from tidegate.runtime.plain_text import plain

NARROW: Final = 100  # columns of a terminal
_FIRST_TO_GO: Final = ("margin", "claim", "harm", "price")
_COLOURS = {"ok": "green", "late": "yellow"}
_EXAMPLES = """\b
Examples:
  tidegate explain                      the last requests, a line each
  tidegate explain 3fa09c-17            one of them in full, by the id in its answer; also by its caller's id,
                                        by its trace-id, or by the number in front of a line ('#17')
  tidegate explain --late --target edge/kiosk-1
  tidegate explain --slowest 10 --model minilm
  tidegate explain --last 100 --json | jq '.decisions[] | select(.outcome != "ok")'
"""


@click.command(epilog=_EXAMPLES)
@click.argument("request_id", required=False)
@click.option("--last", default=10, show_default=True, type=click.IntRange(1), help="How many requests, newest first.")
@click.option(
    "--late", is_flag=True, help="Only requests without an answer in time: late, unanswered, failed or refused."
)
@click.option("--failed", is_flag=True, help="Only requests without any answer.")
@click.option("--hedged", is_flag=True, help="Only requests with a second attempt beside a silent one.")
@click.option("--slowest", type=click.IntRange(1), help="Only this many of the slowest requests, slowest first.")
@click.option("--model", default="", help="Only requests for this model.")
@click.option("--target", default="", help="Only requests that were sent to this target: edge/NAME or pool/NAME.")
@click.option("--tenant", default="", help="Only requests of this tenant.")
@click.option("--json", "as_json", is_flag=True, help="The gateway's own JSON, with every number.")
@admin_option
def explain(
    request_id: str | None,
    last: int,
    late: bool,
    failed: bool,
    hedged: bool,
    slowest: int | None,
    model: str,
    target: str,
    tenant: str,
    as_json: bool,
    admin: str,
) -> None:
    """Show why requests went where they did: each candidate's chances, the choice, the stages, and hindsight.

    REQUEST_ID is the caller's id, the id in the answer (`tidegate-request-id`), a trace-id, or the number in front of a
    line ('#17'); without it the last requests are shown, a line each. A gateway remembers its last thousands
    (`remember_decisions`, `remember_bytes`).
    """
    flags = {"late": late, "failed": failed, "hedged": hedged}
    names = {"id": request_id, "model": model, "target": target, "tenant": tenant, "slowest": slowest}
    query = {"last": last, **{name: 1 for name, on in flags.items() if on}, **{k: v for k, v in names.items() if v}}
    found = read_admin(admin, f"/debug/decisions?{urlencode(query)}")
    decisions = found["decisions"]
    if request_id and not decisions:
        raise click.ClickException(f"the gateway remembers no request of the id {request_id!r}")
    if as_json:
        click.echo(json.dumps(found))
    elif not decisions:  # nothing late is an answer, not a failure
        click.echo(f"the gateway remembers no request {'of that kind' if len(query) > 1 else 'yet'}")
    elif request_id:
        for one in decisions:
            in_full(one, Console())
    else:
        Console().print(summaries(decisions))


def summaries(decisions: list[dict[str, Any]]) -> Table:
    """Return a table with a line for each request."""
    number, target = Column("#", no_wrap=True), Column("went to", no_wrap=True)
    columns = (number, "id", "work", "budget", target, "why", "took", "")
    table = Table(*columns)
    for one in decisions:
        table.add_row(
            f"#{one['number']}",
            plain(one["id"]),
            _work(one),
            _milliseconds(one.get("budget_ms")),
            plain(went_to(one)),
            one["end"].get("reason") or one.get("ended", "no answer"),  # an older gateway does not say how it ended
            _milliseconds(one["elapsed_ms"]),
            _outcome(one),
        )
    return table


def went_to(one: dict[str, Any]) -> str:
    """Return the target that answered, else those that were tried in vain; "-" where there was none."""
    return one["end"].get("served_by") or ", ".join(dict.fromkeys(one.get("tried", ()))) or "-"


def in_full(one: dict[str, Any], console: Console) -> None:
    """Print one request: the sentence, the table of candidates, the events, the waterfall and hindsight."""
    named = f", id {one['id']}" if one["id"] else ""
    console.print(f"[bold]#{one['number']}[/]{plain(named)}: {_work(one)}, {_demands(one)}", highlight=False)
    said = (("answered as", "answered_as"), ("trace", "trace_id"), ("asked for by", "asked_by"))
    called = [f"{name} {one[key]}" for name, key in said if one.get(key)]
    if called:
        console.print(f"[dim]{plain(', '.join(called))}[/]", highlight=False)
    console.print(plain(one["sentence"]), highlight=False)
    if half := one.get("split"):
        console.print(plain(_split(half)), highlight=False)
    if one.get("candidates"):
        narrow = console.width < NARROW
        console.print(candidates_table(one, narrow=narrow))
        if narrow:
            console.print(f"[dim](on {NARROW} columns also {', '.join(_FIRST_TO_GO)})[/]", highlight=False)
    for passed in one.get("passed_over", []):
        console.print(plain(f"not {passed['target']} in {passed['variant']}: {passed['why_not']}"), highlight=False)
    if more := one.get("more_passed_over", 0):
        console.print(f"and {more} more were passed over")
    if one.get("prices", {}).get("scarcity", 1.0) > 1.0:
        console.print(f"the cloud's budget is short: it cost {one['prices']['scarcity']:g} times its plain price")
    for event in one["events"]:
        console.print(plain(_event(event)), highlight=False)
    for resumed in one["end"].get("resumed", ()):
        console.print(plain(_resumed(resumed)), highlight=False)
    console.print(f"{_milliseconds(one['elapsed_ms']):>9}  {_outcome(one)} {plain(_end(one))}", highlight=False)
    print_waterfall(one, console)
    if hindsight := one.get("hindsight"):
        console.print(f"in hindsight: {plain(hindsight['sentence'])}", highlight=False)


def candidates_table(one: dict[str, Any], *, narrow: bool = False) -> Table:
    """Return the candidates of a decision; `narrow` leaves out the columns that matter least."""
    whole = [Column(name, no_wrap=True) for name in ("target", "variant")]
    numbers = ("link", "wait", "comp", "margin", "finish", "chance", "claim", "harm", "price", "cost", "value", "trust")
    shown = [name for name in numbers if not (narrow and name in _FIRST_TO_GO)]
    right = [Column(name, justify="right", no_wrap=True) for name in shown]
    table = Table(*whole, *right, box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for candidate in one["candidates"]:
        mark = "[bold green]" if candidate["target"] == one["chosen"] else ""
        times = (f"{candidate[f'{name}_ms']:.1f}" for name in ("link", "wait", "compute", "margin", "finish"))
        cells = (
            *times,
            f"{candidate['chance']:.1%}",
            _number(candidate.get("calibrated"), ".1%"),
            _number(candidate.get("harm"), ".3g"),
            f"{candidate['price']:.2g}",
            f"{candidate['cost']:.2g}",
            _number(candidate.get("value"), ".3f"),
            f"{candidate['trust']:g}",
        )
        by_name = dict(zip(numbers, cells, strict=True))
        table.add_row(
            f"{mark}{plain(candidate['target'])}", plain(candidate["variant"]), *(by_name[name] for name in shown)
        )
    return table


def _work(one: dict[str, Any]) -> str:
    if "rows" not in one:
        return plain(one["model"] or "-")
    return plain(f"{one['model']} {one['rows']} x {one['longest_row']}")


def _demands(one: dict[str, Any]) -> str:
    words = [f"budget {_milliseconds(one.get('budget_ms'))}"]
    if one.get("priority"):
        words.append(f"priority {one['priority']}")
    if one.get("demanded"):
        words.append(f"variant {one['demanded']}")
    if one.get("pin", "any") != "any":
        words.append(f"pinned to {one['pin']}")
    if one.get("min_quality"):
        words.append(f"quality of at least {one['min_quality']:g}")
    if one.get("attested"):
        words.append("attested targets only")
    return plain(", ".join(words))


def _event(event: dict[str, Any]) -> str:
    when, what = f"{_milliseconds(event['at_ms']):>9}", event["what"]
    if what == "look":
        return f"{when}  planned: a second attempt is considered if there is no answer by then"
    if what == "lent":
        return (
            f"{when}  an answer that is {_milliseconds(event['age_ms'])} old, since nothing else did: {event['error']}"
        )
    attempt = f"attempt {event['attempt'] + 1}"
    if what == "launched":
        return f"{when}  {attempt} to {event['target']} in {event['variant']} ({event.get('reason', '')})"
    if what == "accepted":
        return f"{when}  {attempt} accepted, promised in {_milliseconds(event['promised_in_ms'])}"
    if what == "held":
        return f"{when}  {attempt} gave its first token, which is held back until it is known how sure it is"
    if what == "begun":
        return f"{when}  {attempt} gave its first token"
    if what == "differed":
        return f"{when}  {attempt} said something else than what the caller had, and was left"
    if what == "failed":
        return f"{when}  {attempt} failed: {event['error']}"
    stages = ", ".join(f"{name} {_milliseconds(took)}" for name, took in event.get("stages_ms", {}).items())
    sure = f", confidence {event['confidence']:g}" if "confidence" in event else ""
    return f"{when}  {attempt} {what}{f': {stages}' if stages else ''}{sure}"


def _split(half: dict[str, Any]) -> str:
    if half["role"] == "whole":
        return f"{half['of']} may be cut between layers, and this is the whole: {half['why']}"
    return f"{half['role']} of {half['of']}, cut at {half['layer']}: {half['why']}"


def _resumed(one: dict[str, Any]) -> str:
    because = f", since {one['because']}" if one["because"] else ""
    return (
        f"gone on with after {one['at']} tokens: {one['from']} ({one['reason']}) to {one['to']}, "
        f"{_milliseconds(one['gap_ms'])} without a token, {one['grade']}{because}"
    )


def _outcome(one: dict[str, Any]) -> str:
    return f"[{_COLOURS.get(one['outcome'], 'red')}]{one['outcome']}[/]"


def _end(one: dict[str, Any]) -> str:
    end = one["end"]
    if "error" in end:
        return str(end["error"]).partition(": ")[2]
    extra = [name for name in ("hedged", "fallback", "degraded", "provisional") if end[name]]
    return f"from {end['served_by']} ({', '.join([end['reason'], *extra])}){_tokens(one)}"


def _tokens(one: dict[str, Any]) -> str:
    """What a generation took in its engine; nothing for any other request."""
    took = one.get("tokens")
    if took is None:
        return ""
    cached = f", {took['cached']} of them cached" if took["cached"] else ""
    return (
        f": {took['prompt']} tokens in{cached}, {_milliseconds(took['prefill_ms'])}; {took['completion']} out, "
        f"{_milliseconds(took['decode_ms'])}; ended by {took['finish_reason']}{_budgets(one)}{_wasted(one)}"
    )


def _wasted(one: dict[str, Any]) -> str:
    """How many tokens a second target computed as well, or made for no one."""
    wasted = one.get("wasted_tokens", 0)
    return f"; {wasted} tokens wasted" if wasted else ""


def _budgets(one: dict[str, Any]) -> str:
    """When the first token and each further one came, beside their budgets where there were any."""
    found = one.get("budgets")
    if found is None or found["first_token_ms"] is None:
        return ""
    words = [
        f"{name} {_milliseconds(found[came])}" + (f" of {_milliseconds(found[budget])}" if found[budget] else "")
        for name, came, budget in (("first token", "first_token_ms", "first_ms"), ("each", "each_token_ms", "next_ms"))
        if found[came] is not None
    ]
    return f"; {', '.join(words)}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else printed_duration(value / 1e3)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
