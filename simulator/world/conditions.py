"""The conditions of one seed's world: weather, outages, heat, faults and luck, the same for every policy.

Everything here depends on the scenario and the seed alone, never on what is sent. So two policies meet the same
conditions, and so does the bound that no policy can beat (`simulator/optimum/bound.py`), which reads them without
running anything.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

from simulator.scenarios.scenario import EdgeGroup, Fault
from simulator.scenarios.scenario_file import LoadedScenario
from simulator.workers.slowness import Slowness
from tidegate.netsim.links.distributions import Draw
from tidegate.netsim.links.profile import LinkModel, LinkProfile, Partitions, build
from tidegate.netsim.links.regime import Weather, Windows
from tidegate.netsim.random_streams import stream
from tidegate.outcome import InternalError, Overloaded, ServeError

SETTLING_S = 1.0  # before the first arrival: streams are dialled, tables are known


class WorldConditions:
    """Immutable; each call builds a fresh object with the same future."""

    def __init__(self, loaded: LoadedScenario, seed: int) -> None:
        self._loaded = loaded
        self._scenario = loaded.scenario
        self._seed = seed

    def link(self, id: str, kind: str) -> LinkModel:
        """The link of a worker, of one of the scenario's kinds."""
        profile: LinkProfile = self._scenario.links[kind]
        return build(
            profile,
            self.link_chance(id),
            traces=self._loaded.traces[kind] if profile.recording is not None else None,
            partitions=self.partitions(id),
            jitter_times=self._scenario.jitter_times,
        )

    def link_chance(self, id: str) -> Callable[[str], Draw]:
        """A link's streams of chance, by name."""
        return lambda name: stream(self._seed, id, "link", name).random

    def partitions(self, id: str) -> Partitions:
        def windows(direction: str) -> tuple[tuple[float, float], ...]:
            return tuple(
                window_of(fault)
                for fault in self._scenario.faults
                if fault.kind == "partition" and fault.target == id and fault.direction in ("both", direction)
            )

        return Partitions(windows("to"), windows("from"))

    def slowness(self, id: str, group: EdgeGroup | None) -> Slowness:
        """How slow a device is when. `group` None: a pool, which does not heat up."""
        faults = tuple(
            (Windows([window_of(fault)]), fault.times)
            for fault in self._scenario.faults
            if fault.kind == "slow" and fault.target == id
        )
        if group is None or group.thermal is None:
            return Slowness(faults=faults)
        thermal = group.thermal
        low, high = thermal.slow
        weather = Weather(
            mean_on_s=thermal.for_s,
            mean_off_s=thermal.every_s - thermal.for_s,
            draw=stream(self._seed, id, "thermal").random,
        )
        return Slowness(
            thermal=weather,
            factor_of=lambda end: low + (high - low) * stream(self._seed, id, "heat", f"{end:.6f}").random(),
            faults=faults,
        )

    def windows(self, id: str, *kinds: str) -> Windows:
        """When faults of these kinds befall a target."""
        return Windows(
            [window_of(fault) for fault in self._scenario.faults if fault.target == id and fault.kind in kinds]
        )

    def trouble(self, id: str) -> Callable[[float], ServeError | None]:
        """The error with which a target answers every request at an instant, if a fault makes it."""
        failing, refusing = self.windows(id, "fail_fast"), self.windows(id, "refuse")

        def trouble(now: float) -> ServeError | None:
            if failing.until(now) > now:
                return InternalError("it fails whatever it is asked")
            return Overloaded("it has no room, whatever it is asked") if refusing.until(now) > now else None

        return trouble

    def batch_luck(self, id: str) -> Callable[[], float]:
        """A standard normal for each batch of a pool, in the order in which they are run."""
        source: Random = stream(self._seed, id, "luck")
        return lambda: source.gauss(0.0, 1.0)

    def __repr__(self) -> str:
        return f"<WorldConditions of {self._loaded.source}, seed {self._seed}>"


def window_of(fault: Fault) -> tuple[float, float]:
    """From when to when, on the clock of a run."""
    start = SETTLING_S + fault.at_s
    return start, start + fault.for_s if fault.for_s < inf else inf
