"""Figures in the text of pages are those of the code: each sentence below is made of the constant that it is about.

A constant that changes without its page makes the sentence differ, and so does a page that changes without the code.
"""

from __future__ import annotations

import pytest

from edge_agent.core import connectivity, dial_policy, drain
from gateway.core.access import dial_in
from gateway.core.admission import overload
from gateway.core.estimate import conformal
from gateway.core.fleet import pricing, scaling
from gateway.core.health import degradation
from gateway.core.placement import shortlist, utility
from gateway.core.versions import version_figures, version_shares
from gateway.ingest import deferred, journal
from gateway.observe import traffic_recorder
from gateway.targets import dial_in as dial_in_target
from tests.contract.pages.text import prose
from tidegate.fleet import stored
from tidegate.fleet.conditions import DeviceConditions
from tidegate.priority import WEIGHTS
from tidegate.rollout import root_chain
from tidegate.tools.up import plan

VALUE = utility.UtilityWeights()


def battery(share: float) -> str:
    return f"{round(pricing.battery_factor(DeviceConditions(battery=share, charging=False)), 1):g}"


def heat(celsius: float) -> str:
    return f"{pricing.heat_factor(DeviceConditions(temperature_c=celsius)):g}"


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("docs/placement.md", f"an edge {pricing.TIER['edge']:g}, a pool {pricing.TIER['pool']:g}"),
        (
            "docs/placement.md",
            f"full: {battery(1)}, half: {battery(0.5)}, 20 %: {battery(0.2)}, empty: {battery(0)}",
        ),
        ("docs/placement.md", f"75 °C: {heat(75)}"),
        ("docs/placement.md", f"a megabyte is {pricing.METERED_BYTE * 1e6:g} seconds of a pool"),
        ("docs/placement.md", f"with `memory_leak` {degradation.DEARER:g}"),
        (
            "docs/placement.md",
            f"value = weight · [1 − {VALUE.quality:g} · (1 − quality)] · chance − {VALUE.cost:g} · cost "
            f"− harm − rent − {VALUE.earliness:g} · weight · finish / budget",
        ),
        ("docs/placement.md", f"margin = {conformal.NORMAL:g} · spread"),
        ("docs/placement.md", f"stays between {conformal.LEAST:g} and {conformal.MOST:g}"),
        ("docs/placement.md", f"of a large fleet {shortlist.LOOK_AT_ALL} candidates each"),
        (
            "docs/placement.md",
            "`weight` is 2, 1, ½ or ¼ by priority" if tuple(WEIGHTS.values()) == (2.0, 1.0, 0.5, 0.25) else "?",
        ),
        ("docs/configuration.md", f"Overload is entered after {overload.ENTER_S:g} s in which"),
        ("docs/configuration.md", f"| N + {plan.PORTS_BEFORE_EDGES}, N + {plan.PORTS_BEFORE_EDGES + 1}, … | each edge"),
        ("docs/degradation.md", f"+ backlog / {scaling.DRAIN_S:g} s"),
        ("docs/degradation.md", f"has been gone for {degradation.HOLD_S:g} s"),
        ("docs/edge-device.md", f"has not come for {dial_policy.PATIENCE_S:g} s"),
        ("docs/edge-device.md", f"a name is greeted {dial_in.GREETINGS} times in {dial_in.WITHIN_S:g} s at most"),
        ("docs/edge-device.md", f"a stream without a hello ends after {dial_in_target.GREET_WITHIN_S:g} s"),
        ("docs/offline.md", f"silence after {connectivity.SILENT_S:g} s"),
        (
            "docs/offline.md",
            f"takes three good looks and {connectivity.HOLD_S:g} s" if connectivity.PROBES == 3 else "?",
        ),
        ("docs/offline.md", f"A request of more than {stored.MAX_BODY_BYTES:,} bytes cannot be deferred"),
        ("docs/offline.md", f"with a budget of {deferred.BUDGET_S:g} s"),
        ("docs/offline.md", f"being off counts as {journal.OFF_S / 3600:g} h at most"),
        ("docs/offline.md", f"in trains of {drain.MIN_WINDOW} to {drain.MAX_WINDOW} things"),
        ("docs/recording.md", f"one recording at a time, {traffic_recorder.MOST_S / 3600:g} h at most"),
        ("docs/rollout.md", f"({root_chain.MAX_LINKS} links at most)"),
        ("docs/rollout.md", f"never less than {version_shares.LEAST * 100:g} % of all requests"),
        ("docs/rollout.md", f"or a cosine of {version_figures.ALIKE:g}"),
    ],
)
def test_a_figure_on_a_page_is_the_one_of_the_code(page: str, sentence: str) -> None:
    text = " ".join(" ".join(line.text for line in prose(page)).split())
    assert sentence in text
