"""A scenario: a fleet, its links, its load and what goes wrong, as one short YAML file.

    summary    one line for people
    models     what there is to compute: cost tables as measured (`tidegate model measure` prints one), quality
    links      kinds of links, by name (`tidegate/netsim/links/profile.py`)
    edges      groups of devices: how many, how slow, on which kind of link
    pools      devices with a batcher
    classes    kinds of requests: share, model, size, budget, priority
    arrivals   how many a second, and how evenly
    tenants    what each tenant may use, for classes that name one
    faults     what happens when, and to which target

Files are for people, so durations are in ms or s as the key says. Whatever is wrong is an error that names the file,
the key and what would be right; nothing is guessed or ignored. Copy one of `simulator/scenarios/` and fill in a fleet
of your own.
"""

from __future__ import annotations

from functools import cached_property
from math import inf
from typing import Annotated, Literal

import msgspec

from gateway.core.admission.concurrency import MAX_IN_FLIGHT
from gateway.core.admission.tenants import TenantSpec
from gateway.core.placement.crowd import FROM_GATEWAYS
from gateway.core.placement.utility import COST_WEIGHT
from tidegate.estimate.cost_table import CostTable
from tidegate.models.manifest import Feature
from tidegate.netsim.links.profile import LinkProfile


class _ScenarioPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The common base of a scenario's parts."""


class Unsure(_ScenarioPart, frozen=True, kw_only=True):
    """A model that knows when it does not know: an edge's answer to a hard request comes back unsure.

    Tidegate's own policies escalate unsure answers, as in service. For every policy a hard request that an edge
    answered counts with `hard_quality` of that answer's quality.
    """

    # Where a small model is unsure it is wrong about every second time.
    hard_quality: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    max_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5  # as `confidence.max_share` in a manifest


class Decoding(_ScenarioPart, frozen=True, kw_only=True):
    """What a generating variant's tokens cost on a reference device, as `generation` of a variant in a manifest."""

    prefill_ms: float  # for each token of a prompt
    step_ms: tuple[tuple[int, float], ...]  # (sequences at once, one token of each)
    slots: int = 4

    def __post_init__(self) -> None:
        if self.prefill_ms <= 0.0 or self.slots < 1:
            raise ValueError("prefill_ms must be above 0, and slots 1 or more")
        if not self.step_ms or self.step_ms[0][0] != 1:
            raise ValueError("step_ms must begin with 1 sequence")
        CostTable(self.step_ms)


class GenerationSpec(_ScenarioPart, frozen=True, kw_only=True):
    """A model that answers token by token, with continuous batching on both tiers."""

    edge: Decoding | None = None
    pool: Decoding | None = None
    context: int = 4096  # tokens of prompt and answer
    # The share of tokens at which edge and pool say the same after the same beginning, as a handover may need it.
    agreement: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.9

    def __post_init__(self) -> None:
        if self.edge is None and self.pool is None:
            raise ValueError("edge or pool is needed: the model generates nowhere")

    @property
    def prompt_weight(self) -> float:
        """How many tokens of an answer one of the prompt is worth: of the first variant, as in a manifest."""
        first = self.edge or self.pool
        assert first is not None
        return first.prefill_ms / first.step_ms[0][1]


class SimulatedCut(_ScenarioPart, frozen=True, kw_only=True):
    """A place to cut a model at, as in a manifest's section `split`; both halves are models of the scenario."""

    layer: str
    head: str
    tail: str
    bytes_per_unit: float  # of activations


class ModelSpec(_ScenarioPart, frozen=True, kw_only=True):
    """One model in its two variants. Costs are (work units, milliseconds) of one call, padding included.

    `edge_ms` is of a reference device, which `slow` multiplies; None: it does not run there. A model with `generation`
    has its costs there.
    """

    feature: Feature = "tokens"
    edge_ms: tuple[tuple[float, float], ...] | None = None
    pool_ms: tuple[tuple[float, float], ...] | None = None
    edge_quality: float = 1.0
    pool_quality: float = 1.0
    edge_max_units: int | None = None  # the longest row that an edge takes
    max_batch: int = 32
    max_queue: int = 256
    confidence: Unsure | None = None  # `{}` takes the defaults; None: an answer is an answer
    generation: GenerationSpec | None = None
    cuts: tuple[SimulatedCut, ...] = ()  # which Tidegate's own policies weigh

    def __post_init__(self) -> None:
        if self.generation is not None:
            if self.edge_ms is not None or self.pool_ms is not None:
                raise ValueError("edge_ms and pool_ms are of single answers: a model with generation has its own costs")
            return
        if self.edge_ms is None and self.pool_ms is None:
            raise ValueError("edge_ms or pool_ms is needed: the model runs nowhere")
        for points in (self.edge_ms, self.pool_ms):
            if points is not None:
                CostTable(points)


class Thermal(_ScenarioPart, frozen=True, kw_only=True):
    """Episodes in which a device is slower than it measured at its warm-up, by a factor between the two."""

    every_s: float
    for_s: float
    slow: tuple[float, float]


class Background(_ScenarioPart, frozen=True, kw_only=True):
    """A device's own callers: local requests that no gateway sends, in bursts. `share` is of its time, on average."""

    share: float
    class_: str = msgspec.field(name="class")
    burst_s: float = 2.0


class EdgeGroup(_ScenarioPart, frozen=True, kw_only=True):
    """`count` devices alike but for their speed, which is spread evenly from one factor to the other."""

    count: int
    link: str
    name: str = "edge"
    slow: tuple[float, float] = (1.0, 1.0)
    models: tuple[str, ...] | None = None  # None: all that run on an edge
    edge_ms: dict[str, tuple[tuple[float, float], ...]] = {}  # by model: these devices' own tables, if measured
    takes_ms: dict[str, tuple[tuple[float, float], ...]] = {}  # by model: what calls really take, if known
    noise_sigma: float = 0.1  # of the logarithm of a call's time
    max_queue: int = 64
    thermal: Thermal | None = None
    background: Background | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, not {self.count}")
        if not 0.0 < self.slow[0] <= self.slow[1]:
            raise ValueError(f"slow must be two factors above 0, the smaller first, not {list(self.slow)}")
        for points in (*self.edge_ms.values(), *self.takes_ms.values()):
            CostTable(points)

    def id_of(self, number: int) -> str:
        """Of the device of this number, from 0."""
        return f"edge/{self.name}-{number + 1}"

    def slow_of(self, number: int) -> float:
        low, high = self.slow
        return low + (high - low) * (number / (self.count - 1) if self.count > 1 else 0.0)


class PoolSpec(_ScenarioPart, frozen=True, kw_only=True):
    name: str
    link: str
    slow: float = 1.0
    takes_ms: dict[str, tuple[tuple[float, float], ...]] = {}  # as of edges
    noise_sigma: float = 0.05

    def __post_init__(self) -> None:
        for points in self.takes_ms.values():
            CostTable(points)


class Size(_ScenarioPart, frozen=True, kw_only=True):
    """Lognormal lengths: half are below the median, nine in ten below median · e^(1.28 · sigma)."""

    median: float
    sigma: float = 0.0
    min: int = 1
    max: int = 2**31

    def __post_init__(self) -> None:
        if not self.min <= self.median <= self.max:
            raise ValueError(f"min <= median <= max does not hold: {self.min}, {self.median}, {self.max}")


class OutputSpec(_ScenarioPart, frozen=True, kw_only=True):
    """Lengths of answers in tokens: log-normal by `median` and `sigma`, or through `quantiles` that were published.

    Between two quantiles, as (share, tokens), lengths are log-normal, and beyond the outer ones as between the two next
    to them.
    """

    max_tokens: int
    median: float = 0.0
    sigma: float = 0.0
    quantiles: tuple[tuple[float, float], ...] = ()
    leaves_share: float = 0.0  # of callers, who leave anywhere in the answer

    def __post_init__(self) -> None:
        if bool(self.quantiles) == (self.median > 0.0):
            raise ValueError("either median and sigma or quantiles are needed")
        if self.max_tokens < 1 or not 0.0 <= self.leaves_share <= 1.0:
            raise ValueError("max_tokens must be 1 or more, and leaves_share from 0 to 1")
        shares, lengths = [one for one, _ in self.quantiles], [one for _, one in self.quantiles]
        if self.quantiles and (
            len(shares) < 2
            or shares != sorted(set(shares))
            or lengths != sorted(lengths)
            or not 0.0 < shares[0] <= shares[-1] < 1.0
            or lengths[0] < 1.0
        ):
            raise ValueError("quantiles must be two or more (share, tokens) that rise, shares between 0 and 1")


class ClassSpec(_ScenarioPart, frozen=True, kw_only=True):
    """One kind of request. `share` is of all requests; shares are relative to their sum."""

    name: str
    share: float
    model: str
    length: Size
    budget_ms: float
    priority: int = 0  # 1 is highest, 0 the default
    rows: int = 1
    bytes_per_unit: float = 8.0  # of the request's body
    answer_bytes: int = 1600
    hard_share: float = 0.1  # of requests that a small model answers badly (`confidence` of its model; joint inference)
    tenant: str = ""  # on whose account; "" is no tenant in particular
    retries: int = 0  # how often a client that got no answer sends again, at once and with a fresh budget
    output: OutputSpec | None = None  # of a generating model, whose `length` is that of the prompt
    ttft_ms: float | None = None  # the budget of its first token
    tpot_ms: float | None = None  # and of each further one, on average

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries must be 0 or more, not {self.retries}")


class RateStep(_ScenarioPart, frozen=True, kw_only=True):
    """So many times the rate for a while; `shares` of classes that differ meanwhile, as where one tenant storms."""

    at_s: float
    for_s: float
    times: float
    shares: dict[str, float] = {}


class RecordedArrival(_ScenarioPart, frozen=True, kw_only=True):
    """One request as it really came, of the class in this place of the list, with its own size and budget."""

    at_s: float
    class_: int = msgspec.field(name="class")
    length: int
    rows: int
    budget_ms: float
    body_bytes: int = 0


class ArrivalsSpec(_ScenarioPart, frozen=True, kw_only=True):
    """`rate` a second on average, all gateways together.

    poisson     independent callers
    bursty      a Markov-modulated Poisson process: `burst_times` the usual rate for about `burst_for_s` every
                `burst_every_s`, with the same average
    periodic    devices that ask every `period_s`, each at its own time, jittered by a tenth
    pareto      independent gaps with a tail as u^-`alpha`

    With `recorded` requests these come as they did, and `process` is of no account: at their own `recorded_rate` one by
    one, at another `rate` so many times as often (copies within half a second), or so many of them
    (`simulator/replay/replay.py`).
    """

    rate: float
    process: Literal["poisson", "bursty", "periodic", "pareto"] = "poisson"
    burst_times: float = 2.2
    burst_every_s: float = 4.0
    burst_for_s: float = 1.0
    period_s: float = 1.0
    alpha: float = 1.5
    steps: tuple[RateStep, ...] = ()
    recorded: tuple[RecordedArrival, ...] = ()
    recorded_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.recorded and not self.recorded_rate > 0.0:
            raise ValueError("recorded requests need their recorded_rate, above 0")
        if not self.rate > 0.0:
            raise ValueError(f"rate must be above 0, not {self.rate}")
        if not 0.0 < self.burst_for_s < self.burst_every_s:
            raise ValueError("burst_for_s must be above 0 and below burst_every_s")
        if self.burst_times * self.burst_for_s >= self.burst_every_s:
            raise ValueError("burst_times · burst_for_s must be below burst_every_s, or nothing is left between bursts")
        if self.process == "pareto" and not self.alpha > 1.0:
            raise ValueError(f"alpha must be above 1 for an average to exist, not {self.alpha}")


class TenantShare(_ScenarioPart, frozen=True, kw_only=True):
    """What a tenant may use, as `tenants` in the gateway's configuration; None: without limit."""

    weight: float = 1.0
    pool_s_per_s: float | None = None
    edge_s_per_s: float | None = None
    burst_s: float = 1.0
    max_in_flight: int | None = None

    @property
    def spec(self) -> TenantSpec:
        pool, edge = (inf if rate is None else rate for rate in (self.pool_s_per_s, self.edge_s_per_s))
        return TenantSpec(self.weight, pool, edge, self.burst_s, self.max_in_flight)


class Mqtt(_ScenarioPart, frozen=True, kw_only=True):
    """How edges' heartbeats reach gateways."""

    interval_s: float = 1.0
    delay_ms: float = 20.0
    jitter_ms: float = 10.0  # of an exponential tail; messages may overtake each other
    loss: float = 0.0


class Fault(_ScenarioPart, frozen=True, kw_only=True):
    """Something that happens at `at_s` and ends after `for_s`.

    partition   nothing gets through, silently          to_only / from_only: in one direction
    slow        computing takes `times` as long
    stop        the process stands still (SIGSTOP) and goes on afterwards
    crash       the process is gone, its connections are reset; a new one comes up afterwards
    fail_fast   everything is answered with an error, within a millisecond and without computing
    refuse      everything is refused as one too many (429), as fast
    broker      no heartbeat gets through; `target` is "mqtt"
    """

    kind: Literal["partition", "slow", "stop", "crash", "fail_fast", "refuse", "broker"]
    at_s: float
    for_s: float
    target: str
    times: float = 3.0
    direction: Literal["both", "to", "from"] = "both"


class Scenario(_ScenarioPart, frozen=True, kw_only=True, dict=True):
    """All of it. `knee_rps` is the rate that loads are fractions of; None: measure it."""

    summary: str
    duration_s: float
    models: dict[str, ModelSpec]
    links: dict[str, LinkProfile]
    classes: tuple[ClassSpec, ...]
    arrivals: ArrivalsSpec
    edges: tuple[EdgeGroup, ...] = ()
    pools: tuple[PoolSpec, ...] = ()
    warmup_s: float = 0.0  # of the duration; what arrives in it is served and not counted
    gateways: int = 1
    gateways_per_edge: int | None = None  # None: every gateway uses every edge; else so many, round robin
    mqtt: Mqtt = Mqtt()
    tenants: dict[str, TenantShare] = {}
    faults: tuple[Fault, ...] = ()
    jitter_times: float = 1.0
    knee_rps: float | None = None
    cost_weight: float = COST_WEIGHT  # as a gateway's `cost_weight`; policy value
    max_in_flight: int = MAX_IN_FLIGHT  # of each gateway, as its `max_in_flight`
    cloud_budget: float | None = None  # pool-seconds a second that all gateways together may spend; policy value
    static_threshold: float = 128.0  # units; a baseline sends larger requests to the pool

    @cached_property
    def link_of(self) -> dict[str, str]:
        """The kind of link of each worker, by its id."""
        edges = {group.id_of(number): group.link for group in self.edges for number in range(group.count)}
        return edges | {f"pool/{pool.name}": pool.link for pool in self.pools}

    @property
    def shares_targets(self) -> bool:
        """Whether so many gateways send to one edge, or to a pool, that each looks at a few targets."""
        return (self.gateways_per_edge or self.gateways) >= FROM_GATEWAYS

    def with_rate(self, rate: float) -> Scenario:
        arrivals = msgspec.structs.replace(self.arrivals, rate=rate)
        return msgspec.structs.replace(self, arrivals=arrivals)

    def lasting(self, seconds: float) -> Scenario:
        """The same for another time, with the same share of it for warming up."""
        warmup_s = self.warmup_s * seconds / self.duration_s
        return msgspec.structs.replace(self, duration_s=seconds, warmup_s=warmup_s)

    def with_jitter(self, times: float) -> Scenario:
        return msgspec.structs.replace(self, jitter_times=times)


def target_names(scenario: Scenario) -> list[str]:
    """ "edge/NAME-1", … and "pool/NAME", in the order of the file."""
    edges = [group.id_of(n) for group in scenario.edges for n in range(group.count)]
    return [*edges, *(f"pool/{pool.name}" for pool in scenario.pools)]
