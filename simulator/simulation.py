"""One run: a scenario, a policy and a seed become a fleet on virtual time, and its requests are tallied.

    arrivals ─▶ gateways (fleet view · placement · request machine · evidence)      real
                  │ streams over link models                                         simulated
                  ▼
                edges (edge queue)   pools (batcher)                                 real, their speed simulated
                  └─ heartbeats over a broker's delay and loss ─▶ gateways

Chance has a stream per source (`tidegate/netsim/random_streams.py`), so two policies with one seed see the same
requests, the same weather, the same episodes of heat and the same background load: their difference is theirs.

Arrivals stop at `duration_s`, and the run goes on until every request has an answer. Nothing grows with the number of
requests: they are generated as time comes to them, and counted when they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random

from edge_agent.core.reporting import JITTER_RATIO, MIN_GAP_S
from gateway.core.placement.cloud_budget import CloudBudget
from simulator.baselines import policies
from simulator.baselines.clairvoyant import PerfectKnowledge
from simulator.event_queue import EventQueue
from simulator.scenarios.scenario import EdgeGroup, Fault, PoolSpec
from simulator.scenarios.scenario_file import LoadedScenario
from simulator.workers.edge import EdgeWorker
from simulator.workers.generating import GeneratingWorker
from simulator.workers.job import SimulatedJob
from simulator.workers.pool import PoolWorker
from simulator.workers.worker import MOVED, SimulatedWorker, edge_offers, offers_of
from simulator.world.arrivals import SimulatedRequest, request_of, requests
from simulator.world.conditions import SETTLING_S, WorldConditions
from simulator.world.garbage_collection import looking_rarely
from simulator.world.gateway import Router, SimulatedGateway
from simulator.world.layer_split import execute_cut
from simulator.world.link_stream import LoadSpread, SimulatedStream
from simulator.world.tally import OutcomeTally
from tidegate.estimate.cost_table import CostTable
from tidegate.models.manifest import Feature
from tidegate.netsim.links.regime import Weather, Windows
from tidegate.netsim.random_streams import stream
from tidegate.outcome import ServeError
from tidegate.types import Accepted, LoadReport

_POOL_QUEUE = 256  # generations that wait in a pool: `batching.max_queue_size` of a manifest that does not say
_RING = 97  # a prime, so that streams' heartbeats do not fall together


@dataclass(frozen=True, slots=True)
class Run:
    """What one run found. Compute is in seconds, by tier, of the counted part of the run."""

    policy: str
    seed: int
    tally: OutcomeTally
    counted_s: float
    compute_s: dict[str, float]
    events: int


def simulate(
    loaded: LoadedScenario, policy: str, seed: int, *, on_progress: Callable[[float], None] = lambda _share: None
) -> Run:
    """Run the scenario once.

    Args:
        on_progress: called with the share of the duration that is done, about fifty times.

    Raises:
        ScenarioError: a recording that it names cannot be read.
        KeyError: there is no such policy.
    """
    return World(loaded, policy, seed).run(on_progress)


class World:
    """The parts of one run. Mutable: `run` once."""

    def __init__(
        self, loaded: LoadedScenario, policy: str, seed: int, *, tally: Callable[[float], OutcomeTally] = OutcomeTally
    ) -> None:
        """Args: tally: makes what counts, from the instant that it is given on."""
        self.events = EventQueue()
        self.workers: dict[str, SimulatedWorker] = {}
        self.gateways: list[SimulatedGateway] = []
        self._loaded = loaded
        self._scenario = loaded.scenario
        self._policy = policy
        self._seed = seed
        self._conditions = WorldConditions(loaded, seed)
        self._truth = PerfectKnowledge(self._scenario, seed, self._conditions)
        self.tally = tally(SETTLING_S + self._scenario.warmup_s)
        self._compute_before: dict[str, float] = {}
        self._build()

    def run(self, on_progress: Callable[[float], None] = lambda _share: None) -> Run:
        scenario, events = self._scenario, self.events
        end = SETTLING_S + scenario.duration_s
        arrivals = requests(scenario, self._seed)
        self._next_arrival(arrivals, stream(self._seed, "gateways"))
        events.schedule(self.tally.counts_from, self._note_compute)
        with looking_rarely():
            for step in range(1, 51):
                events.run(until=end * step / 50)
                on_progress(step / 50)
            events.run()
        self.tally.check()
        compute_s = {tier: total - self._compute_before[tier] for tier, total in self._compute().items()}
        counted_s = scenario.duration_s - scenario.warmup_s
        return Run(self._policy, self._seed, self.tally, counted_s, compute_s, events.executed)

    def _next_arrival(self, arrivals: Iterator[SimulatedRequest], draw: Random) -> None:
        request = next(arrivals, None)
        if request is not None:
            moved = request._replace(at=request.at + SETTLING_S)
            self.events.schedule(moved.at, self._arrive, moved, arrivals, draw)

    def _arrive(self, request: SimulatedRequest, arrivals: Iterator[SimulatedRequest], draw: Random) -> None:
        gateway = self.gateways[int(draw.random() * len(self.gateways))]
        self._next_arrival(arrivals, draw)
        gateway.take(request)

    def _note_compute(self) -> None:
        self._compute_before = self._compute()

    def _compute(self) -> dict[str, float]:
        totals = {"edge": 0.0, "pool": 0.0}
        for worker in self.workers.values():
            totals[worker.id.partition("/")[0]] += worker.compute_s
        return totals

    # building

    def _build(self) -> None:
        scenario = self._scenario
        self._add_gateways()
        place = 0
        for group in scenario.edges:
            for number in range(group.count):
                self._add_edge(group, number, place)
                place += 1
        for pool in scenario.pools:
            self._add_pool(pool)
        for fault in scenario.faults:
            if fault.kind == "crash":
                self.events.schedule(SETTLING_S + fault.at_s, self._crash, fault)

    def _add_gateways(self) -> None:
        self.gateways.extend(self._gateway(number, self.tally) for number in range(self._scenario.gateways))

    def _gateway(self, number: int, tally: OutcomeTally) -> SimulatedGateway:
        models = self._scenario.models
        feature: Callable[[str, str], Feature] = lambda model, _version: models[model].feature  # noqa: E731
        return SimulatedGateway(
            self.events,
            tally,
            feature,
            self._router(number),
            stream(self._seed, "gateway", number).random,
            cloud_budget=self._budget(),
            unsure={name: one.confidence for name, one in models.items() if one.confidence is not None},
            prompt_weights={
                name: one.generation.prompt_weight for name, one in models.items() if one.generation is not None
            },
            execute=partial(execute_cut, models) if any(one.cuts for one in models.values()) else None,
            agreement=min(
                [one.generation.agreement for one in models.values() if one.generation is not None], default=1.0
            ),
        )

    def _number_of(self, gateway: SimulatedGateway) -> int:
        return self.gateways.index(gateway)

    def _router(self, number: int) -> Callable[[SimulatedGateway], Router]:
        draw = stream(self._seed, "router", number).random
        threshold, truth, shared = self._scenario.static_threshold, self._truth, self._scenario.shares_targets
        tenants = {name: share.spec for name, share in self._scenario.tenants.items()}
        weight, most = self._scenario.cost_weight, self._scenario.max_in_flight
        return lambda gateway: policies.router(
            self._policy,
            policies.Surroundings(
                gateway, draw, threshold, truth, shared, tenants, cost_weight=weight, max_in_flight=most
            ),
        )

    def _budget(self) -> CloudBudget | None:
        total = self._scenario.cloud_budget
        return None if total is None else CloudBudget(total / self._scenario.gateways)

    def _add_edge(self, group: EdgeGroup, number: int, place: int) -> None:
        id = group.id_of(number)
        gateways = self._gateways_of(place)
        if self._generates:
            device = self._generating(id, group, group.slow_of(number), group.noise_sigma)
            self._connect(device, group.link, gateways)
            self._beat(device, gateways)
            return
        worker = EdgeWorker(
            self.events,
            id,
            edge_offers(self._scenario, group, number),
            max_queue=group.max_queue,
            sigma=group.noise_sigma,
            takes_ms=group.takes_ms,
            slowness=self._conditions.slowness(id, group),
            standstills=self._conditions.windows(id, "stop"),
        )
        self._connect(worker, group.link, gateways)
        self._beat(worker, gateways)
        if group.background is not None:
            _LocalCallers(self, worker, group, self._seed).start()

    def _add_pool(self, pool: PoolSpec) -> None:
        id = f"pool/{pool.name}"
        if self._generates:
            self._connect(self._generating(id, None, pool.slow, pool.noise_sigma), pool.link, self.gateways)
            return
        worker = PoolWorker(
            self.events,
            id,
            offers_of(self._scenario.models, "pool", pool.slow),
            self._scenario.models,
            sigma=pool.noise_sigma,
            takes_ms=pool.takes_ms,
            slowness=self._conditions.slowness(id, None),
            standstills=self._conditions.windows(id, "stop"),
            luck=self._conditions.batch_luck(id),
        )
        self._connect(worker, pool.link, self.gateways)

    @property
    def _generates(self) -> bool:
        return any(model.generation is not None for model in self._scenario.models.values())

    def _generating(self, id: str, group: EdgeGroup | None, slow: float, sigma: float) -> GeneratingWorker:
        return GeneratingWorker(
            self.events,
            id,
            self._scenario.models,
            slow=slow,
            max_queue=_POOL_QUEUE if group is None else group.max_queue,
            sigma=sigma,
            slowness=self._conditions.slowness(id, group),
            standstills=self._conditions.windows(id, "stop"),
            luck=self._conditions.batch_luck(id),
        )

    def _gateways_of(self, place: int) -> list[SimulatedGateway]:
        count = self._scenario.gateways_per_edge
        if count is None:
            return self.gateways
        return [self.gateways[(place + turn) % len(self.gateways)] for turn in range(min(count, len(self.gateways)))]

    def _connect(self, worker: SimulatedWorker, kind: str, gateways: list[SimulatedGateway]) -> None:
        self.workers[worker.id] = worker
        worker.trouble = self._conditions.trouble(worker.id)
        link, spread = self._conditions.link(worker.id, kind), LoadSpread(self.events)
        for gateway in gateways:
            draw = stream(self._seed, worker.id, "stream", self._number_of(gateway)).random
            one = SimulatedStream(
                self.events, worker, link,
                on_event=gateway.on_event, draw=draw, phase=len(self.workers) % _RING / _RING,
                lasts_until=SETTLING_S + self._scenario.duration_s, spread=spread,
            )  # fmt: skip
            gateway.know(worker.id, "edge" if worker.id.startswith("edge/") else "pool", one)
            self.events.schedule(self.events.now + 0.5 * SETTLING_S * draw(), one.dial)

    def _beat(self, worker: SimulatedWorker, gateways: list[SimulatedGateway]) -> None:
        _Heartbeats(self, worker, gateways, self._conditions.windows("mqtt", "broker")).start()

    def _crash(self, fault: Fault) -> None:
        worker = self.workers[fault.target]
        worker.crash()
        for gateway in self.gateways:
            if (one := gateway.streams.get(worker.id)) is not None:
                one.reset()
        self.events.schedule(self.events.now + fault.for_s, worker.restart)

    def __repr__(self) -> str:
        return f"<World {self._policy} seed {self._seed} {self.events!r}>"


class _Heartbeats:
    """An edge's load over MQTT: late, sometimes lost, sometimes out of order.

    A heartbeat is sent at intervals, and early once the queue has moved by more than half and by `MOVED`, but
    not twice within `MIN_GAP_S`: the cadence of `edge_agent/core/reporting.py`, whose messages themselves are not
    simulated.
    """

    def __init__(
        self, world: World, worker: SimulatedWorker, gateways: list[SimulatedGateway], broker_gone: Windows
    ) -> None:
        self._world = world
        self._worker = worker
        self._gateways = gateways
        self._broker_gone = broker_gone
        self._draw = stream(world._seed, worker.id, "mqtt")
        self._mqtt = world._scenario.mqtt
        self._reported_at = -inf
        self._reported_queued = 0
        self._due = False  # news wait for the end of the gap
        self._until = SETTLING_S + world._scenario.duration_s

    def start(self) -> None:
        self._worker.notify_moves(self._news)
        self._world.events.schedule(self._mqtt.interval_s * self._draw.random(), self._beat)

    def _beat(self) -> None:
        now = self._world.events.now
        if now >= self._until:
            return
        self._publish(now)
        jitter = 1.0 + JITTER_RATIO * (2.0 * self._draw.random() - 1.0)
        self._world.events.schedule(now + self._mqtt.interval_s * jitter, self._beat)

    def _news(self) -> None:
        queued, reported = self._worker.queued, self._reported_queued
        if abs(queued - reported) < MOVED or abs(queued - reported) <= 0.5 * reported:
            return
        now = self._world.events.now
        if now >= self._reported_at + MIN_GAP_S:
            self._publish(now)
        elif not self._due:
            self._due = True
            self._world.events.schedule(self._reported_at + MIN_GAP_S, self._overdue_news)

    def _overdue_news(self) -> None:
        self._due = False
        self._news()

    def _publish(self, now: float) -> None:
        events, mqtt, worker = self._world.events, self._mqtt, self._worker
        self._reported_at, self._reported_queued = now, worker.queued
        if not worker.alive or worker.standing_until(now) > now or self._broker_gone.until(now) > now:
            return
        load = worker.load_report(now)
        for gateway in self._gateways:
            if self._draw.random() >= mqtt.loss:
                late_s = 1e-3 * (mqtt.delay_ms + mqtt.jitter_ms * self._draw.expovariate(1.0))
                events.schedule(now + late_s, gateway.heard, worker.id, load)


class _LocalCallers:
    """A device's own callers, which no gateway knows: bursts of local requests. A `JobCaller` that needs no answer."""

    def __init__(self, world: World, worker: EdgeWorker, group: EdgeGroup, seed: int) -> None:
        assert group.background is not None
        self._world = world
        self._worker = worker
        self._draw = stream(seed, worker.id, "locals")
        self._kind = next(kind for kind in world._scenario.classes if kind.name == group.background.class_)
        table = {offer.name: offer.variants[0].cost for offer in worker.offers}[self._kind.model]
        mean_s = _mean_seconds(table, self._kind.length.median * self._kind.rows)
        self._gap_s = mean_s / min(0.95, 3.0 * group.background.share)  # in a burst, which is a third of the time
        burst_s = group.background.burst_s
        self._bursts = Weather(
            mean_on_s=burst_s, mean_off_s=2.0 * burst_s, draw=stream(seed, worker.id, "local bursts").random
        )
        self._until = SETTLING_S + world._scenario.duration_s

    def start(self) -> None:
        self._world.events.schedule(self._bursts.next_on(SETTLING_S * 0.5), self._ask)

    def _ask(self) -> None:
        events, kind = self._world.events, self._kind
        now = events.now
        if now >= self._until:
            return
        if self._bursts.until(now) == now:
            events.schedule(self._bursts.next_on(now), self._ask)
            return
        request = request_of(kind, -1, now, self._draw)
        if self._worker.alive and self._worker.standing_until(now) == now:
            job = SimulatedJob(
                -1, self, kind.model,
                rows=kind.rows, length=request.length, deadline=now + kind.budget_ms / 1e3,
                priority=kind.priority, luck=request.noise,
            )  # fmt: skip
            self._worker.take(job, now)
        events.schedule(now + self._gap_s * self._draw.expovariate(1.0), self._ask)

    def accepted(self, job: SimulatedJob, word: Accepted) -> None: ...

    def made(self, jobs: Sequence[SimulatedJob]) -> None: ...

    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport) -> None: ...

    def refused(self, job: SimulatedJob, error: ServeError, load: LoadReport) -> None: ...


def _mean_seconds(points: tuple[tuple[float, float], ...], units: float) -> float:
    return CostTable(points).seconds_for(units)
