"""The console's rows of models: on how many targets each is in memory, and what it is elsewhere.

A model that is loaded on demand and not in memory is `cold`: a request for it waits for the load, in the seconds that
its target tells. What is on its way (loading, warming) and what failed is counted apart, so that a model that is ready
on two of ten devices does not look well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.core.fleet.target import TargetView
from tidegate.fleet.offers import SERVING


def model_rows(targets: Iterable[TargetView]) -> list[dict[str, Any]]:
    """Return a row for each model and version that a target offers, in the order of names."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for target in targets:
        if not target.up:
            continue
        for offer in target.offers:
            row = rows.setdefault(
                (offer.name, offer.version),
                {
                    "model": offer.name,
                    "version": offer.version,
                    "ready": 0,
                    "cold": 0,
                    "cold_s": 0.0,
                    "coming": 0,
                    "bad": 0,
                    "variants": set(),
                },
            )
            row["variants"].update(one.name for one in offer.variants)
            if offer.state in SERVING:
                row["ready"] += 1
            elif offer.cold_s > 0.0 or offer.state == "evicted":
                row["cold"] += 1
                row["cold_s"] = max(row["cold_s"], offer.cold_s)
            else:
                row["bad" if offer.state == "bad" else "coming"] += 1
    return [{**row, "variants": sorted(row["variants"])} for _, row in sorted(rows.items())]
