"""Simulated links between the parts of `tidegate up`: which part is reached through which link, on which ports.

    --link pool=lte_driving --link edge-1=flap_fast

A link is one more child process (`tidegate link`) in front of a part, with an HTTP control of its own. Every process
that reaches the part gets the link's address: the gateway for the pool, an edge for what it announces to the fleet, all
of them for the broker. The part itself listens where it always did.

Scenarios are read by the link, which starts after the part has warmed up; a name that does not exist is refused before
anything starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from tidegate.runtime.suggestion import did_you_mean

PORTS_PER_LINK: Final = 2
# Where the link's own names are (`tidegate/netsim/proxy/scenario.py`), which no tool may import.
_NAMED: Final = ("netsim", "links", "profiles")


class LinkOptionError(Exception):
    """A `--link` that cannot be; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """One link: `part` is reached at `port`, and the link itself is controlled at `control_port`."""

    part: str
    scenario: str
    port: int
    control_port: int

    def arguments(self, host: str, upstream_port: int, seed: int) -> tuple[str, ...]:
        return (
            "--name", f"link-{self.part}",
            "--listen", f"{host}:{self.port}",
            "--upstream", f"{host}:{upstream_port}",
            "--control", f"{host}:{self.control_port}",
            "--scenario", self.scenario,
            "--seed", str(seed),
            "--json",
        )  # fmt: skip


def parse(words: Sequence[str], parts: Sequence[str], first_port: int) -> dict[str, LinkPlan]:
    """PART=SCENARIO, … as links by part, each with its ports.

    Raises:
        LinkOptionError: not of that form, no such part or scenario, or twice the same.
    """
    links: dict[str, LinkPlan] = {}
    for word in words:
        part, equals, scenario = word.partition("=")
        if not (part and equals and scenario):
            raise LinkOptionError(f"--link {word}: must be PART=SCENARIO, like pool=lte_driving")
        if part not in parts:
            raise LinkOptionError(f"--link {word}: there is no part {part!r} (there are: {', '.join(parts)})")
        if part in links:
            raise LinkOptionError(f"--link {word}: {part} has a link already; put both into one scenario file")
        if not Path(scenario).is_file() and scenario not in (known := _names()):
            raise LinkOptionError(
                f"--link {word}: there is no link scenario {scenario!r}, and no file; "
                f"`tidegate link --list` names the scenarios.{did_you_mean(scenario, known)}"
            )
        port = first_port + PORTS_PER_LINK * len(links)
        links[part] = LinkPlan(part, scenario, port, port + 1)
    return links


def _names() -> list[str]:
    """Of the scenarios that come with the package."""
    profiles = files("tidegate").joinpath(*_NAMED)
    return sorted(one.name.removesuffix(".yaml") for one in profiles.iterdir() if one.name.endswith(".yaml"))
