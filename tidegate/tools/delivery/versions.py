"""`tidegate model split`, `promote` and `return` run two versions of a model side by side, and end that.

The split belongs to the gateway, as a rollout does. `tidegate model status` shows both versions' figures beside each
other for as long as it lasts.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final
from urllib.parse import quote

import click
from rich.table import Column, Table

from tidegate.admin_client import Admin, admin_option
from tidegate.tools.delivery.follow import console

_json = click.option("--json", "as_json", is_flag=True, help="The gateway's own JSON.")


class Percentage(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """`5%`, as a share from 0 to 1."""

    name = "percentage"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if not re.fullmatch(r"\d{1,3}(\.\d{1,6})?%", str(value)) or float(str(value)[:-1]) > 100.0:
            self.fail(f"{value!r}: a percentage, as in 5%", param, ctx)
        return float(str(value)[:-1]) / 100.0


@click.command()
@click.argument("model")
@click.argument("candidate")
@click.option(
    "--share", type=Percentage(), default="0%", show_default=True, help="Share of requests without a version."
)
@click.option("--tenant", "tenants", multiple=True, help="All of this tenant's requests; may be repeated.")
@click.option(
    "--standing", default="", help="The version beside it, preferred from now on. Default: what requests get now."
)
@click.option(
    "--compare", type=Percentage(), default="0%", show_default=True,
    help="Share of the standing version's requests that the candidate answers too, to compare both.",
)  # fmt: skip
@admin_option
@_json
def split(
    model: str,
    candidate: str,
    share: float,
    tenants: tuple[str, ...],
    standing: str,
    compare: float,
    admin: str,
    as_json: bool,
) -> None:
    """Put version CANDIDATE of MODEL on trial beside the standing version, or change its share.

    A caller may also choose: `tidegate-version: candidate`, or `standing`. Targets must serve both versions: shipped
    by `tidegate model rollout`, or named in their configuration (`models: [minilm:1, minilm:2]` of a pool).

    \b
    Examples:
      tidegate model split minilm 2 --share 5%
      tidegate model split minilm 2 --share 20% --tenant acme --compare 10%
      tidegate model status minilm
      tidegate model promote minilm
    """
    wanted = {"candidate": candidate, "standing": standing, "share": share, "tenants": tenants, "compare": compare}
    body = json.dumps(wanted).encode()
    _show(Admin(admin).put(f"/v1/versions/{quote(model, safe='')}/trial", body), as_json)


@click.command()
@click.argument("model")
@admin_option
@_json
def promote(model: str, admin: str, as_json: bool) -> None:
    """End the trial: MODEL's candidate becomes the preferred version.

    Requests that name no version get it while any target serves it. A version that is rolled out later gets its share
    beside it, and a rollback of the promoted version ends the preference.

    \b
    Example:
      tidegate model promote minilm
    """
    _show(Admin(admin).post(f"/v1/versions/{quote(model, safe='')}/promote", b""), as_json)


@click.command("return")
@click.argument("model")
@admin_option
@_json
def call_back(model: str, admin: str, as_json: bool) -> None:
    """End the trial: requests get what they got before it.

    \b
    Example:
      tidegate model return minilm
    """
    _show(Admin(admin).post(f"/v1/versions/{quote(model, safe='')}/return", b""), as_json)


COMMANDS: Final = (split, promote, call_back)


def words_of_default(model: dict[str, Any]) -> str:
    """What requests get that name no version, from the gateway's report of a model."""
    if not model["ready"]:
        return f"no answer: no target serves any version of {model['name']}"
    shares = {one["version"]: one["share"] for one in model["versions"] if one["share"]}
    if len(shares) > 1:
        return f"{model['name']} " + " or ".join(f"{version} ({share:.0%})" for version, share in shares.items())
    lost = model["preferred"] not in (None, model["meant"]) and model["trial"] is None and not shares
    note = f"; {model['preferred']} is preferred, and no target serves it" if lost else ""
    return f"{model['name']} {model['meant']}{note}"


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report))
    else:
        console().print(versions_table([report]))
        if report["trial"] is None:
            click.echo(f"requests that name no version get {words_of_default(report)}")


def versions_table(models: list[dict[str, Any]]) -> Table:
    """The versions and the targets that serve them; on trial, with figures since it began."""
    right = [Column(name, justify="right") for name in ("edges", "pools", "asked", "in time", "p50", "p95", "failed")]
    table = Table(Column("model", no_wrap=True), "version", "gets", *right, "quality")
    for model in models:
        trial = model["trial"]
        for one in model["versions"]:
            figures = trial["figures"].get(one["version"]) if trial else None
            table.add_row(
                model["name"],
                one["version"],
                _gets(model, one),
                str(one["edges"] + one["soaking"]),
                str(one["pools"]),
                *(_figures(figures) if figures else [""] * 5),
                _quality(one, model, figures),
            )
    return table


def _gets(model: dict[str, Any], one: dict[str, Any]) -> str:
    trial, version = model["trial"], one["version"]
    if one["share"]:  # a rollout is under way, or was
        return f"{100.0 * one['share']:.0f} % of what names none"
    if trial is None or version not in (trial["standing"], trial["candidate"]):
        if any(other["share"] for other in model["versions"]):
            return "what names it"
        return "what names none" if version == model["meant"] else "what names it"
    if version == trial["standing"]:
        return f"{100.0 * (1.0 - trial['share']):g} %, standing"
    tenants = f" and {', '.join(trial['tenants'][:3])}" if trial["tenants"] else ""
    return f"{100.0 * trial['share']:g} %{tenants}, candidate"


def _figures(figures: dict[str, Any]) -> list[str]:
    if not figures["asked"]:
        return ["0", "", "", "", ""]
    low, high = figures["in_time_95"]
    in_time = f"{100 * figures['in_time_ratio']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
    times = [f"{figures['ms'][name]:.1f} ms" if name in figures["ms"] else "" for name in ("p50", "p95")]
    return [str(figures["asked"]), in_time, *times, str(figures["failed"])]


def _quality(one: dict[str, Any], model: dict[str, Any], figures: dict[str, Any] | None) -> str:
    words = [f"{name} {found['metric']} {found['value']:.4g}" for name, found in one["quality"].items()]
    trial = model["trial"]
    if figures and figures["provisional"] + figures["escalated"]:
        words.append(f"unsure {figures['provisional'] + figures['escalated']}")
    if trial and one["version"] == trial["candidate"] and trial["agreement"]["rows"]:
        agreement = trial["agreement"]
        words.append(
            f"agrees {100 * agreement['ratio']:.1f} % of {agreement['rows']} rows (cosine {agreement['cosine']:.4f})"
        )
    return ", ".join(words)
