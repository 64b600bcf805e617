"""The trial report: the figures of both versions of each trial, as JSON for screens and as metric families.

There is a series for each ending of both versions of each model on trial, and for no other version. The series end with
the trial; a new trial counts from zero, which Prometheus takes for a restart.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec
from prometheus_client.metrics_core import Metric

from gateway.core.estimate.sliding_stats import Ending
from gateway.core.versions.traffic_split import CANDIDATE, STANDING
from gateway.core.versions.version_figures import Agreement, VersionFigures
from gateway.delivery.trials import TrialFigures, Trials
from tidegate.metrics.families import counter, gauge

SHOWN: Final = 6


def trial_report(trials: Trials, model: str) -> dict[str, Any]:
    """Return the split with both versions' figures. Raises KeyError: no version of this model is on trial."""
    split, watched = trials.splits.split[model], trials.watched.get(model, TrialFigures())
    return {
        **msgspec.to_builtins(split),
        "began_at_utc": watched.began_at_utc,
        "figures": {one: _figures(watched.of(one)) for one in (split.standing, split.candidate)},
        "agreement": _agreement(watched.agreement),
    }


def trial_rows(trials: Trials) -> list[dict[str, Any]]:
    """Return the first trials for a screen; tenants are counted, since there may be a thousand of them."""
    shown = []
    for model in list(trials.splits.split)[:SHOWN]:
        one = trial_report(trials, model)
        shown.append({"model": model, **one, "tenants": len(one["tenants"])})
    return shown


def trial_families(trials: Trials) -> list[Metric]:
    asked: list[tuple[tuple[str, ...], float]] = []
    agree: list[tuple[tuple[str, ...], float]] = []
    for model, split in trials.splits.split.items():
        watched = trials.watched.get(model, TrialFigures())
        for role, version in ((STANDING, split.standing), (CANDIDATE, split.candidate)):
            endings = watched.of(version).endings
            asked += [((model, version, role, ending), endings[ending]) for ending in get_args(Ending)]
        if (ratio := watched.agreement.ratio) is not None:
            agree.append(((model,), ratio))
    labels = ("model", "version", "role", "ending")
    return [
        counter("tidegate_trial_requests", "Of the two versions on trial, by how they ended.", labels, asked),
        gauge("tidegate_trial_agreement_ratio", "Share of compared rows on which both agree.", ("model",), agree),
    ]


def _figures(figures: VersionFigures) -> dict[str, Any]:
    quantiles, interval = figures.quantiles_s, figures.in_time_interval
    return {
        "asked": figures.asked,
        "in_time": figures.endings["in_time"],
        "late": figures.endings["late"],
        "failed": figures.endings["failed"],
        "failures": dict(figures.failures),
        "in_time_ratio": _rounded(figures.in_time_ratio),
        "in_time_95": [_rounded(value) for value in interval] if interval else None,
        "ms": {name: round(value * 1e3, 3) for name, value in zip(("p50", "p95", "p99"), quantiles, strict=False)},
        "provisional": figures.provisional,
        "escalated": figures.escalated,
        "degraded": figures.degraded,
    }


def _agreement(seen: Agreement) -> dict[str, Any]:
    return {
        "rows": seen.rows,
        "ratio": _rounded(seen.ratio),
        "cosine": _rounded(seen.cosine),
        "cosine_least": _rounded(seen.cosine_least) if seen.rows else None,
        "unanswered": seen.unanswered,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
