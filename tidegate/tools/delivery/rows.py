"""A row for each device and model compares the device's report with what rollouts require of it."""

from __future__ import annotations

from typing import Any, Final

SILENT: Final = "not heard of any more: this is its last word"
Json = dict[str, Any]


def device_rows(devices: list[Json], rollouts: list[Json], models: set[str]) -> list[Json]:
    """A row for each device and model, in the device's own words where it has some."""
    wanted = {(name, one["model"]): (one, part) for one in rollouts for name, part in one["devices"].items()}
    rows = []
    for device in devices:
        reports = {report["model"]: report for report in (device["reported"] or {}).get("models", ())}
        offers = {offer["name"]: offer for offer in device["offers"]}
        for model in sorted(models or {*reports, *offers}):
            report, offer = reports.get(model, {}), offers.get(model, {})
            one, part = wanted.get((device["name"], model), ({}, {}))
            if not (report or offer or part):
                continue
            asked = part.get("desired_revision")
            rows.append(
                {
                    "device": device["name"],
                    "model": model,
                    "freshness": device["freshness"],
                    "running": report.get("running") or offer.get("version", ""),
                    "wanted": _wanted_version(one, part, report),
                    "state": report.get("state") or offer.get("state", ""),
                    "reason": report.get("reason")
                    or part.get("reason")
                    or (SILENT if device["freshness"] == "dead" else ""),
                    "reported_revision": report.get("rev", 0),
                    "desired_revision": asked or 0,
                    "done_bytes": report.get("done", 0),
                    "total_bytes": report.get("total", 0),
                    "step": part.get("step", ""),
                    "rollout": one.get("id", ""),
                }
            )
    return rows


def _wanted_version(rollout: Json, part: Json, report: Json) -> str:
    if not part or part["desired_revision"] is None:
        return str(report.get("ver", ""))
    if part["step"] in ("recalled", "back", "stuck"):
        return str(report.get("ver", "")) if report.get("rev") == part["desired_revision"] else "the one before"
    return str(rollout["version"])
