"""A scenario: a fleet, its links, its load and what goes wrong, as one short YAML file.

    summary    one line for people
    models     what there is to compute: cost tables as measured (`tidegate model measure` prints one), quality
    links      kinds of links, by name (`simulator/links/profile.py`)
    edges      groups of devices: how many, how slow, on which kind of link
    pools      devices with a batcher
    classes    kinds of requests: share, model, size, budget, priority
    arrivals   how many a second, and how evenly
    faults     what happens when, to whom

Files are for people, so durations are in ms or s as the key says. Whatever is wrong is an error that names the file,
the key and what would be right; nothing is guessed or ignored. Copy one of `simulator/scenarios/` and fill in a fleet
of your own.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from simulator.links.profile import LinkProfile
from simulator.links.trace import Trace
from tidegate.estimate.cost_table import CostTable
from tidegate.models.manifest import Feature

SCENARIOS = Path(__file__).parent / "scenarios"


class ScenarioError(Exception):
    """A scenario cannot be used; the message names the file and the key."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all parts of a scenario are."""


class ModelSpec(_Part, frozen=True, kw_only=True):
    """One model in its two variants. Costs are (work units, milliseconds) of one call, padding included.

    `edge_ms` is of a reference device, which `slow` multiplies; None: it does not run there.
    """

    feature: Feature = "tokens"
    edge_ms: tuple[tuple[float, float], ...] | None = None
    pool_ms: tuple[tuple[float, float], ...] | None = None
    edge_quality: float = 1.0
    pool_quality: float = 1.0
    edge_max_units: int | None = None  # the longest row that an edge takes
    max_batch: int = 32
    max_queue: int = 256

    def __post_init__(self) -> None:
        if self.edge_ms is None and self.pool_ms is None:
            raise ValueError("edge_ms or pool_ms is needed: the model runs nowhere")
        for points in (self.edge_ms, self.pool_ms):
            if points is not None:
                CostTable(points)


class Thermal(_Part, frozen=True, kw_only=True):
    """Episodes in which a device is slower than it measured at its warm-up, by a factor between the two."""

    every_s: float
    for_s: float
    slow: tuple[float, float]


class Background(_Part, frozen=True, kw_only=True):
    """A device's own callers: local requests that no gateway sends, in bursts. `share` is of its time, on average."""

    share: float
    class_: str = msgspec.field(name="class")
    burst_s: float = 2.0


class EdgeGroup(_Part, frozen=True, kw_only=True):
    """`count` devices alike but for their speed, which is spread evenly from one factor to the other."""

    count: int
    link: str
    name: str = "edge"
    slow: tuple[float, float] = (1.0, 1.0)
    models: tuple[str, ...] | None = None  # None: all that run on an edge
    noise_sigma: float = 0.1  # of the logarithm of a call's time
    max_queue: int = 64
    thermal: Thermal | None = None
    background: Background | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, not {self.count}")
        if not 0.0 < self.slow[0] <= self.slow[1]:
            raise ValueError(f"slow must be two factors above 0, the smaller first, not {list(self.slow)}")


class PoolSpec(_Part, frozen=True, kw_only=True):
    name: str
    link: str
    slow: float = 1.0
    noise_sigma: float = 0.05


class Size(_Part, frozen=True, kw_only=True):
    """Lognormal lengths: half are below the median, nine in ten below median · e^(1.28 · sigma)."""

    median: float
    sigma: float = 0.0
    min: int = 1
    max: int = 2**31

    def __post_init__(self) -> None:
        if not self.min <= self.median <= self.max:
            raise ValueError(f"min <= median <= max does not hold: {self.min}, {self.median}, {self.max}")


class ClassSpec(_Part, frozen=True, kw_only=True):
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
    hard_share: float = 0.1  # of requests that a small model answers badly; only joint inference looks at it


class Step(_Part, frozen=True, kw_only=True):
    at_s: float
    for_s: float
    times: float


class ArrivalsSpec(_Part, frozen=True, kw_only=True):
    """`rate` a second on average, all gateways together.

    poisson     independent callers
    bursty      a Markov-modulated Poisson process: `burst_times` the usual rate for about `burst_for_s` every
                `burst_every_s`, with the same average
    periodic    devices that ask every `period_s`, each at its own time, jittered by a tenth
    pareto      independent gaps with a tail as u^-`alpha`
    """

    rate: float
    process: Literal["poisson", "bursty", "periodic", "pareto"] = "poisson"
    burst_times: float = 2.2
    burst_every_s: float = 4.0
    burst_for_s: float = 1.0
    period_s: float = 1.0
    alpha: float = 1.5
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if not self.rate > 0.0:
            raise ValueError(f"rate must be above 0, not {self.rate}")
        if not 0.0 < self.burst_for_s < self.burst_every_s:
            raise ValueError("burst_for_s must be above 0 and below burst_every_s")
        if self.burst_times * self.burst_for_s >= self.burst_every_s:
            raise ValueError("burst_times · burst_for_s must be below burst_every_s, or nothing is left between bursts")
        if self.process == "pareto" and not self.alpha > 1.0:
            raise ValueError(f"alpha must be above 1 for an average to exist, not {self.alpha}")


class Mqtt(_Part, frozen=True, kw_only=True):
    """How edges' heartbeats reach gateways."""

    interval_s: float = 1.0
    delay_ms: float = 20.0
    jitter_ms: float = 10.0  # of an exponential tail; messages may overtake each other
    loss: float = 0.0


class Fault(_Part, frozen=True, kw_only=True):
    """Something that happens at `at_s` and ends after `for_s`.

    partition   nothing gets through, silently          to_only / from_only: in one direction
    slow        computing takes `times` as long
    stop        the process stands still (SIGSTOP) and goes on afterwards
    crash       the process is gone, its connections are reset; a new one comes up afterwards
    broker      no heartbeat gets through; `target` is "mqtt"
    """

    kind: Literal["partition", "slow", "stop", "crash", "broker"]
    at_s: float
    for_s: float
    target: str
    times: float = 3.0
    direction: Literal["both", "to", "from"] = "both"


class Scenario(_Part, frozen=True, kw_only=True):
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
    faults: tuple[Fault, ...] = ()
    jitter_times: float = 1.0
    knee_rps: float | None = None
    static_threshold: float = 128.0  # units; a baseline sends larger requests to the pool

    def with_rate(self, rate: float) -> Scenario:
        arrivals = msgspec.structs.replace(self.arrivals, rate=rate)
        return msgspec.structs.replace(self, arrivals=arrivals)

    def lasting(self, seconds: float) -> Scenario:
        """The same for another time, with the same share of it for warming up."""
        warmup_s = self.warmup_s * seconds / self.duration_s
        return msgspec.structs.replace(self, duration_s=seconds, warmup_s=warmup_s)

    def with_jitter(self, times: float) -> Scenario:
        return msgspec.structs.replace(self, jitter_times=times)


class Loaded:
    """A scenario with the files that it names. `traces` has the recordings of each link that has them."""

    def __init__(self, scenario: Scenario, folder: Path, source: str) -> None:
        self.scenario = scenario
        self.source = source
        self._folder = folder

    @cached_property
    def traces(self) -> dict[str, tuple[Trace, Trace]]:
        return {
            name: (self._trace(name, "to_target", link.recording.to_target),
                   self._trace(name, "from_target", link.recording.from_target))
            for name, link in self.scenario.links.items()
            if link.recording is not None
        }  # fmt: skip

    def replaced(self, scenario: Scenario) -> Loaded:
        return Loaded(scenario, self._folder, self.source)

    def _trace(self, link: str, key: str, name: str) -> Trace:
        path = self._folder / name
        try:
            return Trace.parse(path.read_text())
        except (OSError, ValueError) as error:
            raise ScenarioError(f"{self.source}: key 'links.{link}.recording.{key}': {path}: {error}") from error

    def __repr__(self) -> str:
        return f"<Loaded {self.source}: {self.scenario.summary}>"


def names() -> tuple[str, ...]:
    """Of the scenarios that come with the package."""
    return tuple(sorted(path.stem for path in SCENARIOS.glob("*.yaml")))


def load(name: str) -> Loaded:
    """The scenario of this name, or in this file.

    Raises:
        ScenarioError: it does not exist, or is not one.
    """
    path = SCENARIOS / f"{name}.yaml" if name in names() else Path(name)
    try:
        text = path.read_text()
    except OSError as error:
        raise ScenarioError(f"there is no scenario {name!r}: {error}; by name: {', '.join(names())}") from error
    return Loaded(parse(text, str(path)), path.parent, str(path))


def parse(text: str, source: str) -> Scenario:
    """Read and check a scenario. Raises ScenarioError."""
    try:
        raw: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScenarioError(f"{source}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ScenarioError(f"{source}: a scenario is a mapping of keys, this is {type(raw).__name__}")
    try:
        scenario = msgspec.convert(raw, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{source}: {_in_words(str(error))}") from error
    for key, why in _misfits(scenario):
        raise ScenarioError(f"{source}: key {key!r}: {why}")
    return scenario


def _in_words(message: str) -> str:
    """msgspec's "… - at `$.edges[0].slow`" as "key 'edges[0].slow': …"."""
    match = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", message, re.DOTALL)
    assert match is not None
    what, where = match[1], match[2] or ""
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if unknown:
        return f"key {'.'.join(filter(None, (where, unknown[1])))!r}: there is no such key"
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing:
        return f"key {'.'.join(filter(None, (where, missing[1])))!r} is missing"
    return f"key {where!r}: {what}" if where else what


def _misfits(scenario: Scenario) -> list[tuple[str, str]]:
    """Keys whose values do not fit to each other, and why."""
    found: list[tuple[str, str]] = []

    def must_name(key: str, name: str, known: dict[str, Any]) -> None:
        if name not in known:
            found.append((key, f"there is no {name!r} (there are: {', '.join(known) or 'none'})"))

    for place, edge in enumerate(scenario.edges):
        must_name(f"edges[{place}].link", edge.link, scenario.links)
        for model in edge.models or ():
            must_name(f"edges[{place}].models", model, scenario.models)
        if edge.background is not None:
            classes = {one.name: one for one in scenario.classes}
            must_name(f"edges[{place}].background.class", edge.background.class_, classes)
    for place, pool in enumerate(scenario.pools):
        must_name(f"pools[{place}].link", pool.link, scenario.links)
    for place, kind in enumerate(scenario.classes):
        must_name(f"classes[{place}].model", kind.model, scenario.models)
        model_spec = scenario.models.get(kind.model)
        if model_spec is not None and kind.rows > model_spec.max_batch:
            found.append((f"classes[{place}].rows", f"{kind.rows} are more than the model's max_batch"))
    targets = {*target_names(scenario), "mqtt"}
    for place, fault in enumerate(scenario.faults):
        if fault.target not in targets:
            found.append((f"faults[{place}].target", f"there is no {fault.target!r}"))
        if (fault.kind == "broker") != (fault.target == "mqtt"):
            found.append((f"faults[{place}].target", "a fault of the broker has the target 'mqtt', and no other has"))
    if not scenario.edges and not scenario.pools:
        found.append(("edges", "a fleet needs an edge or a pool"))
    if not scenario.classes or sum(one.share for one in scenario.classes) <= 0.0:
        found.append(("classes", "at least one class with a share above 0 is needed"))
    if not 0.0 <= scenario.warmup_s < scenario.duration_s:
        found.append(("warmup_s", f"must be from 0 up to below duration_s ({scenario.duration_s})"))
    names_of_groups = [edge.name for edge in scenario.edges]
    if len(set(names_of_groups)) < len(names_of_groups):
        found.append(("edges", "two groups have one name"))
    return found


def target_names(scenario: Scenario) -> list[str]:
    """ "edge/NAME-1", … and "pool/NAME", in the order of the file."""
    edges = [f"edge/{group.name}-{n + 1}" for group in scenario.edges for n in range(group.count)]
    return [*edges, *(f"pool/{pool.name}" for pool in scenario.pools)]
