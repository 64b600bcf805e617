"""The status line of `tidegate link`: the scenario, the partition, connections and rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tidegate import clock
from tidegate.netsim.links.stream import NAMES
from tidegate.netsim.proxy.timeline import LinkTimeline

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S: Final = 0.5


async def status_line(timeline: LinkTimeline, console: Console) -> None:
    """Show it until cancelled."""
    from rich.live import Live
    from rich.text import Text

    before, before_at = timeline.link.state(), clock.now()
    with Live(Text(words(timeline, before, before, 1.0)), console=console, transient=True, auto_refresh=False) as live:
        while True:
            await clock.sleep(EVERY_S)
            state, now = timeline.link.state(), clock.now()
            live.update(Text(words(timeline, state, before, now - before_at)), refresh=True)
            before, before_at = state, now


def words(timeline: LinkTimeline, state: Mapping[str, Any], before: Mapping[str, Any], elapsed_s: float) -> str:
    """One line: the scenario, what is broken, connections, rates and what is held."""
    rates = [
        (state["bytes"][name]["delivered"] - before["bytes"][name]["delivered"]) * 8e-6 / elapsed_s for name in NAMES
    ]
    held_kbyte = sum(state["bytes"][name]["held"] for name in NAMES) / 1e3
    parts = [
        timeline.playing.name if timeline.playing else ", ".join(state["layers"]) or "no layers",
        f"{state['partition'].upper()} {'/'.join(state['cut'])}".rstrip() if state["partition"] else "whole",
        f"{state['connections']} connections",
        f"↑ {rates[0]:.2f} ↓ {rates[1]:.2f} Mbit/s",
        f"{held_kbyte:.0f} kB held",
        f"{state['at_s']:.0f} s",
    ]
    if state["violations"]:
        parts.append(f"{state['violations']} VIOLATIONS")
    return " · ".join(parts)
