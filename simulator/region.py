"""One run of a region of sites: upstream gateways over site gateways, each over its own devices.

    arrivals ─▶ region gateways ─▶ streams over `wan` ─▶ site gateways ─▶ streams over the group's link ─▶ edges
                     a share of them, of a site's own callers ─▶ ┘

Each group of edges in the scenario is a site. All gateways are the real cores; what a region knows of a site is its
real summary (`simulator/world/site.py`). Against it stands the same scenario in a `World`: one flat fleet of all
devices, each at the end of a link as long as both together.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from simulator.scenarios.scenario_file import LoadedScenario
from simulator.simulation import World
from simulator.world.arrivals import SimulatedRequest
from simulator.world.conditions import SETTLING_S
from simulator.world.gateway import SimulatedGateway
from simulator.world.link_stream import SimulatedStream
from simulator.world.site import SimulatedSite
from simulator.world.tally import OutcomeTally
from tidegate.netsim.random_streams import stream


class RegionWorld(World):
    """Mutable: `run` once. `tally` counts the region's callers; each site's gateway has one of its own callers."""

    def __init__(
        self, loaded: LoadedScenario, policy: str, seed: int, *, link: str = "wan", local_share: float = 0.0
    ) -> None:
        """Args:
        link: the kind of link between a region's gateway and a site.
        local_share: of the requests, those of sites' own callers.
        """
        self.sites: list[SimulatedSite] = []
        self._link = link
        self._local_share = local_share
        self._site_of = [number for number, group in enumerate(loaded.scenario.edges) for _ in range(group.count)]
        super().__init__(loaded, policy, seed)

    def _add_gateways(self) -> None:
        super()._add_gateways()
        for number, group in enumerate(self._scenario.edges):
            tally = OutcomeTally(self.tally.counts_from)
            gateway = self._gateway(len(self.gateways) + number, tally)
            site = SimulatedSite(self.events, f"site/{group.name}", gateway)
            self.sites.append(site)
            self._dial(site)

    def _dial(self, site: SimulatedSite) -> None:
        link = self._conditions.link(site.id, self._link)
        for number, gateway in enumerate(self.gateways):
            draw = stream(self._seed, site.id, "stream", number).random
            one = SimulatedStream(
                self.events, site, link, on_event=gateway.on_event, draw=draw, phase=draw(),
                lasts_until=SETTLING_S + self._scenario.duration_s,
            )  # fmt: skip
            gateway.know(site.id, "site", one)
            # After its devices: a site that greets before has nothing to offer until its next summary.
            self.events.schedule(self.events.now + SETTLING_S * (0.5 + 0.2 * draw()), one.dial)

    def _number_of(self, gateway: SimulatedGateway) -> int:
        every = [*self.gateways, *(site.gateway for site in self.sites)]
        return every.index(gateway)

    def _gateways_of(self, place: int) -> list[SimulatedGateway]:
        return [self.sites[self._site_of[place]].gateway]

    def _arrive(self, request: SimulatedRequest, arrivals: Iterator[SimulatedRequest], draw: Random) -> None:
        if self._local_share and draw.random() < self._local_share:
            self._next_arrival(arrivals, draw)
            self.sites[int(draw.random() * len(self.sites))].gateway.take(request)
            return
        super()._arrive(request, arrivals, draw)
