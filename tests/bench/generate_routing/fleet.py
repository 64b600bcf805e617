"""The processes under comparison (edges, a pool, a gateway for each rule, callers) and the links between them.

    callers ──▶ gateway named after its rule ──link──▶ four edges, the pool                     links: simulated
    callers with LiteLLM's Router ──link──▶ the edges' OpenAI ports, a gateway beside the pool

All gateways stand all the time, and one is asked at a time. A run's weather is a list of instants at which a link's
profile changes, since weather of a link's own chance would be another one for each rule.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import yaml
from msgspec.structs import replace

from simulator.scenarios.scenario import Decoding, Scenario
from tests.bench.generate_routing.rules import RULES
from tests.bench.generate_routing.schedule import MODEL
from tests.bench.generate_routing.workload import IDS, STOP_CHANCE
from tests.bench.harness import ROOT, Child
from tests.support.models.generative import COST
from tests.support.models.text_side import text_side_folder
from tests.support.paced_generation import write_pace
from tidegate import clock
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import save_manifest
from tidegate.netsim.links.trace import CapacityTrace
from tidegate.testing.links import LinkThread, SimLink

TIDEGATE: Final = "tidegate"
LITELLM: Final = "litellm"
ALL_RULES: Final = (TIDEGATE, *RULES, LITELLM)
PEERS: Final = ROOT / ".venv-peers" / "bin" / "python"
_STRATEGY: Final = "simple-shuffle"  # LiteLLM's default, and what it recommends
_LEAD_S: Final = 0.6  # from the command to a run's first instant
_SILENT_S: Final = 60.0

Traces = tuple[CapacityTrace, CapacityTrace]
Profile = dict[str, Any]


class Change(NamedTuple):
    """From this instant of a run on the links of one tier are like this."""

    at: float
    tier: str
    profile: Profile


class LinkKind(NamedTuple):
    """What the ways to edges and pool are like: `usual`, and in stretches of bad weather."""

    name: str
    usual: dict[str, Profile]
    bad: Mapping[str, tuple[float, float, Profile]] = MappingProxyType({})  # by tier: seconds between, length, how
    traces: Traces | None = None  # of the pool's

    def changes(self, seconds: float, seed: int) -> list[Change]:
        """The weather of a run; each stretch begins somewhere in its period, and ends within it."""
        found = []
        for tier, (every_s, for_s, profile) in self.bad.items():
            chance = Random(f"{seed} {self.name} {tier}")
            at = 0.0
            while at < seconds:
                begins = at + chance.random() * (every_s - for_s)
                found += [Change(begins, tier, profile), Change(begins + for_s, tier, self.usual[tier])]
                at += every_s
        return sorted(found, key=lambda one: one.at)


class Talkers:
    """Everything that runs, inside `async with`."""

    def __init__(self, scratch: Path, scenario: Scenario, rules: Sequence[str]) -> None:
        self.rules = tuple(rules)
        self.stop_tokens: tuple[int, ...] = ()
        self._scratch = scratch
        self._scenario = scenario
        self._stack = AsyncExitStack()
        self._links: dict[str, list[SimLink]] = {"edge": [], "pool": []}
        self._ports: dict[str, int] = {}  # of gateways, by rule
        self._openai: list[tuple[int, int]] = []  # (port, slots) for LiteLLM
        self.children: dict[str, Child] = {}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._stack = stack
            await self._start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(
        self, rule: str, schedule: Path, link: LinkKind, seconds: float, *, seed: int, offset_s: float = 0.0
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """One run: what was heard of each request, and how late they were sent."""
        self.usual(link, offset_s)
        answers = self._scratch / f"answers-{rule}.json"
        began_at = clock.now() + _LEAD_S
        words: dict[str, Any] = {"schedule": str(schedule), "answers": str(answers), "began_at": began_at}
        if rule == LITELLM:
            callers, words = self.children["litellm callers"], words | {"targets": self._openai, "strategy": _STRATEGY}
        else:
            callers, words = self.children["callers"], words | {"port": self._ports[rule]}
        await callers.command(**words)
        weather = asyncio.create_task(self._change(link.changes(seconds, seed), began_at), name="weather")
        try:
            found = await callers.line()
        finally:
            weather.cancel()
        return json.loads(answers.read_text()), found

    def usual(self, link: LinkKind, offset_s: float = 0.0) -> None:
        """Make all links what they are between stretches of weather."""
        for tier, links in self._links.items():
            traces = link.traces if tier == "pool" else None
            recording = {} if traces is None else {"recording": {"offset_s": offset_s}}
            for one in links:
                one.apply(traces=traces, **link.usual[tier], **recording)

    async def _change(self, changes: Sequence[Change], began_at: float) -> None:
        for at, tier, profile in changes:
            await clock.sleep_until(began_at + at)
            for one in self._links[tier]:
                one.apply(**profile)

    async def _start(self) -> None:
        manifest = write_model(self._scratch / "models", self._scenario)
        assert manifest.generative is not None
        self.stop_tokens = manifest.generative.stop_tokens
        thread = LinkThread()
        self._stack.callback(thread.close)
        targets, openai = [], []
        (group,) = self._scenario.edges
        (decoding_edge, decoding_pool) = decodings(self._scenario)
        for number in range(group.count):
            name = f"{group.name}-{number + 1}"
            words = {
                "name": name, "grpc_port": 0, "http_port": 0, "paced_slow": group.slow_of(number),
                "state_dir": str(self._scratch / name),
            }  # fmt: skip
            edge = await self._child(name, "edge_agent", words)
            grpc = self._link(thread, f"{name} grpc", "edge", edge.ready["addresses"]["grpc"])
            http = self._link(thread, f"{name} http", "edge", edge.ready["addresses"]["http"])
            targets.append({"name": name, "tier": "edge", "address": grpc.address})
            openai.append((http.port, decoding_edge.slots))
        pool = await self._child("pool", "cloud_pool", {"name": "pool", "grpc_port": 0, "device": "cpu"})
        address = pool.ready["addresses"]["grpc"]
        grpc = self._link(thread, "pool grpc", "pool", address)
        targets.append({"name": "pool", "tier": "pool", "address": grpc.address})
        for rule in self.rules:
            if rule != LITELLM:
                self._ports[rule] = await self._gateway(rule, targets)
        self.children["callers"] = await self._stack.enter_async_context(
            Child("callers", "-m", "tests.bench.generate_routing.http_callers", log=self._scratch / "callers.log")
        )
        if LITELLM in self.rules:
            beside = await self._gateway("beside", [{"name": "pool", "tier": "pool", "address": address}])
            http = self._link(thread, "pool http", "pool", f"127.0.0.1:{beside}")
            self._openai = [*openai, (http.port, decoding_pool.slots)]
            log = self._scratch / "litellm.log"
            self.children["litellm callers"] = await self._stack.enter_async_context(
                Child("litellm callers", "-m", "tests.bench.generate_routing.litellm_callers", log=log, python=PEERS)
            )

    async def _gateway(self, name: str, targets: Sequence[dict[str, Any]]) -> int:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
        plain = {"shed": False, "adaptive_limit": False} if name in RULES else {}
        words = {"name": name, "targets": list(targets), "remember_decisions": 4096, **ports, **plain}
        child = await self._child(name, "tests.bench.generate_routing.rules", words)
        return int(child.ready["addresses"]["http"].rpartition(":")[2])

    async def _child(self, name: str, module: str, words: dict[str, Any]) -> Child:
        """Started, and ready."""
        common: dict[str, Any] = {"model_repository": str(self._scratch / "models"), "log_level": "warning"}
        if module != "tests.bench.generate_routing.rules":
            common |= {"warmup_budget_s": 3.0}
        config = self._scratch / f"{name}.yaml"
        config.write_text(yaml.safe_dump({**common, **words}))
        child = Child(name, "-m", module, "--config", str(config), log=self._scratch / f"{name}.log")
        await self._stack.enter_async_context(child)
        while child.ready["event"] != "ready":
            child.ready = await child.line()
        self.children[name] = child
        return child

    def _link(self, thread: LinkThread, name: str, tier: str, address: str) -> SimLink:
        made = thread.link(address.removeprefix("http://"), name=name)
        self._links[tier].append(made)
        return made

    def __repr__(self) -> str:
        return f"<Talkers {', '.join(self.rules)}>"


def decodings(scenario: Scenario) -> tuple[Decoding, Decoding]:
    """Of an edge of speed 1, and of the pool."""
    generation = scenario.models[MODEL].generation
    assert generation is not None and generation.edge is not None and generation.pool is not None
    return generation.edge, generation.pool


def write_model(models: Path, scenario: Scenario) -> Manifest:
    """One model in two variants, an edge's and the pool's, with one text side."""
    folder = models / MODEL / "1"
    folder.mkdir(parents=True)
    manifest = text_side_folder(folder)
    variants = [
        _variant(folder, manifest.variants[0], tier, one)
        for tier, one in zip(("edge", "pool"), decodings(scenario), strict=True)
    ]
    saved = replace(manifest, variants=tuple(variants))
    save_manifest(folder, saved)
    return saved


def _variant(folder: Path, like: Variant, tier: str, decoding: Decoding) -> Variant:
    steps = tuple((float(batch), ms) for batch, ms in decoding.step_ms)
    path = write_pace(
        folder, step_ms=steps, slots=decoding.slots, prefill_ms=decoding.prefill_ms, context=512, ids=IDS,
        stop_chance=STOP_CHANCE,
    )  # fmt: skip
    artefact = path.rename(folder / f"{tier}.yaml")
    cost = replace(
        COST, prefill_ms=decoding.prefill_ms, step_ms=decoding.step_ms, cache_bytes=1024, slots=decoding.slots
    )
    return replace(
        like, name=tier, artefact=artefact.name, where=(tier,), sha256=sha256_of(artefact),
        size_bytes=artefact.stat().st_size, generation=cost,
    )  # fmt: skip
