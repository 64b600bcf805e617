"""The measurements in turn: everybody is started once and asked alone; a repeat visits all of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.batching import sections, servers, texts
from tests.bench.batching.contenders import BUDGETS_S, Contender, InProcess, Rates, Server
from tests.bench.batching.servers import DEMO, POLICIES, WINDOW_S, Peer, PeerFailed, Pool, Where, add_model
from tests.bench.harness import Child, Report, Spread, table

CALLERS: Final = (1, 8, 64)
MAIN: Final = ("deadline", "sjf", "fifo1", "mosec-b1", "mosec-b8")  # in every repeat; the others in the first
QUICK: Final = ("deadline", "sjf", "mosec-b1")
GUESSES: Final = {"window": 20.0, "eager": 20.0, "adaptive": 15.0, "triton": 25.0}
_GUESS: Final = 70.0
_CHECKED: Final = 24
_LIMIT_ROWS: Final = 512
_BARE_ROWS: Final = 250
_COSINE: Final = 0.9999
_COSINE_BF16: Final = 0.999


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    repeats: int
    seconds: float  # of each run
    minutes: float
    quick: bool
    peers: bool


class Bench:
    """Everybody who is measured, and what was found."""

    def __init__(self, plan: Plan, report: Report, scratch: Path, core: int | None, stack: AsyncExitStack) -> None:
        self.plan = plan
        self.report = report
        self.rates = Rates(plan.seconds)
        self.limit: list[float] = []
        self.fifo: list[float] = []
        self.bare_s: list[float] = []
        self.closed: dict[str, dict[int, list[float]]] = {}
        self.p50_s: dict[str, list[float]] = {}
        self.latency_s: dict[str, dict[int, dict[str, list[float]]]] = {}  # by server, callers and quantile
        self.skipped: dict[str, str] = {}
        self.split: dict[str, float] = {}
        self.overload: dict[str, float] = {}
        self.packed: dict[str, str] = {}  # row names of packed variants, by precision
        self._scratch = scratch
        self._core = core
        self._stack = stack
        self._servers: dict[str, Server] = {}
        self._contenders: dict[str, Contender] = {}
        self._pools: dict[str, Pool] = {}
        self._bare: tuple[list[int], list[float]] = ([], [])
        self._began = time.perf_counter()

    async def start(self) -> None:
        """Start everybody, one after another, and compare what they say with the model itself."""
        rows, answers = self._scratch / "rows.json", self._scratch / "answers.npy"
        texts.write_rows(DEMO / "tokenizer.json", rows)
        words = "-m", "tests.bench.batching.alone", "onnx", str(DEMO / "fp32.onnx"), str(rows)
        self._alone = await self._stack.enter_async_context(Child("in process", *words, core=self._core))
        generator = Child(
            "generator", "-m", "tests.bench.batching.generator", str(rows), log=self._scratch / "generator.log"
        )
        self._generator = await self._stack.enter_async_context(generator)
        await self._without("answers", count=_CHECKED, into=str(answers))
        self._start_pools()
        await self._start_peers()
        for policy in ("sjf", "fifo1"):
            self._contenders[policy] = InProcess(policy, self._alone, policy)
        for server in self._servers.values():
            found = await server.ask("check", answers=str(answers))
            least = _COSINE_BF16 if "bf16" in server.name else _COSINE
            if found["cosine"] < least:
                raise SystemExit(f"{server.name} gives other answers than the model: cosine {found['cosine']:.5f}")
        self._say(f"up and right: {', '.join(self._servers)}")

    async def measure(self) -> None:
        for repeat in range(self.plan.repeats):
            if repeat and time.perf_counter() - self._began > self.plan.minutes * 60:
                self._say(f"no time for repeat {repeat + 1}")
                break
            await self._repeat(repeat)
        deadline = self._servers["deadline"]
        split = await self._without("fifo1", mix="split", count=60)
        seconds = 4.0 if self.plan.quick else 4 * self.plan.seconds
        self.split = await sections.split_mix(deadline, split["rps"], seconds, 1, self._scratch)
        self.overload = await sections.overload(deadline, self.limit[-1], self._bare, seconds / 2, 2, self._scratch)
        self.report.figures |= {"split": self.split, "overload": self.overload}
        for name, found in (("split", self.split), ("overload", self.overload)):
            self._say(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in found.items()))

    async def growth(self) -> None:
        """One worker and two, each on a core of its own; the generator and the server share one of them."""
        if self._core is None:
            return
        found = {}
        rows = self._scratch / "rows.json"
        async with Child("generator", "-m", "tests.bench.batching.generator", str(rows)) as generator:
            for cores in ((self._core,), (self._core, 0)):
                with self._pool(f"workers-{len(cores)}", "models", ["minilm"], cores, workers=len(cores)) as pool:
                    server = Server("growth", generator, Where("link", pool.port, "minilm"))
                    found[str(len(cores))] = (await server.closed(64, self._closed_s(), 0))["rps"]
        self.report.figures["growth_rps"] = found
        self._say(f"growth: {found}")

    # Starting

    def _start_pools(self) -> None:
        manifest = servers.demo_manifest()
        graph = servers.variant_of(manifest, engine="onnx", precision="fp32")
        if graph is None:
            raise SystemExit("the demo model has no fp32 ONNX graph: tidegate model build minilm")
        models = self._scratch / "models"
        for policy in POLICIES:
            delay = {"max_queue_delay_s": WINDOW_S} if policy == "window" else {}
            add_model(models, "minilm" if policy == "deadline" else policy, graph, {"policy": policy, **delay})
        ours = self._open_pool("deadline", "models", ["minilm"])
        self._serve("deadline", Where("link", ours.port, "minilm"), told_budgets=True)
        self._serve("deadline-oip", Where("oip", ours.port, "minilm"), told_budgets=True)
        rivals = self._open_pool("rivals", "models", list(POLICIES[1:]))
        for policy in POLICIES[1:]:
            self._serve(policy, Where("link", rivals.port, policy), told_budgets=True)
        self._start_packed(manifest)

    def _start_packed(self, manifest: dict[str, Any]) -> None:
        """A pool for each variant that takes its rows without padding."""
        for variant in manifest["variants"]:
            if not variant.get("packed"):
                continue
            name = f"packed-{variant['precision']}"
            add_model(self._scratch / name, "minilm", variant, {})
            pool = self._open_pool(name, name, ["minilm"], precision=variant["precision"])
            self._serve(name, Where("link", pool.port, "minilm"), told_budgets=True)
            self.packed[variant["precision"]] = name

    def _open_pool(self, name: str, models: str, served: list[str], **config: Any) -> Pool:
        cores = None if self._core is None else (self._core,)
        self._pools[name] = self._stack.enter_context(self._pool(name, models, served, cores, **config))
        return self._pools[name]

    def _pool(self, name: str, models: str, served: list[str], cores: tuple[int, ...] | None, **config: Any) -> Pool:
        config |= {"models": served, "warmup_budget_s": 2.0 * len(served) if self.plan.quick else 5.0 * len(served)}
        return Pool(name, self._scratch / models, self._scratch, cores, **config)

    async def _start_peers(self) -> None:
        graph = DEMO / "fp32.onnx"
        peers = [servers.mosec(1, graph, self._core, self._scratch), servers.mosec(8, graph, self._core, self._scratch)]
        for package, peer in [
            *(("mosec", one) for one in peers),
            ("pytriton", servers.triton(graph, self._core, self._scratch)),
        ]:
            self.skipped[peer.name] = servers.missing(package) if self.plan.peers else "not asked for"
            if not self.skipped[peer.name]:
                await self._start_peer(peer)
            if self.skipped[peer.name]:
                self._say(f"{peer.name} skipped: {self.skipped[peer.name]}")

    async def _start_peer(self, peer: Peer) -> None:
        try:
            await self._stack.enter_async_context(peer)
        except (PeerFailed, TimeoutError) as error:
            self.skipped[peer.name] = f"did not start: {error}"
        else:
            self._serve(peer.name, peer.where)

    def _serve(self, name: str, where: Where, *, told_budgets: bool = False) -> None:
        self._servers[name] = self._contenders[name] = Server(name, self._generator, where, told_budgets)

    # Measuring

    async def _repeat(self, repeat: int) -> None:
        seed = repeat + 1
        await self._limits(seed)
        for server in self._servers.values():
            if repeat == 0 or self._is_main(server.name):
                await self._close(server, seed)
        for name, contender in self._contenders.items():
            if self._is_main(name) or (repeat == 0 and not self.plan.quick):
                await self.rates.search(contender, seed, GUESSES.get(name, _GUESS))
                held = [f"{self.rates.of(name, budget_s)[-1]:.0f}/s in {budget_s * 1e3:g} ms" for budget_s in BUDGETS_S]
                self._say(f"{name}: {', '.join(held)}")
        self._show()

    def _is_main(self, name: str) -> bool:
        return name in (QUICK if self.plan.quick else (*MAIN, *self.packed.values()))

    async def _limits(self, seed: int) -> None:
        scale = 4 if self.plan.quick else 1
        self.limit.append((await self._without("limit", count=_LIMIT_ROWS // scale, seed=seed))["rps"])
        found = await self._without("bare", count=_BARE_ROWS // scale, seed=seed)
        self.bare_s.append(found["p50_s"])
        self.fifo.append(len(found["took_s"]) / sum(found["took_s"]))
        lengths = texts.lengths("mixed")
        rows = [due.row for due in texts.schedule(seed, 100.0, _BARE_ROWS // scale / 100.0)]
        self._bare = [lengths[row] for row in rows], found["took_s"]
        self._say(
            f"limit {self.limit[-1]:.1f}/s, one at a time {self.fifo[-1]:.1f}/s, p50 {self.bare_s[-1] * 1e3:.2f} ms"
        )

    async def _close(self, server: Server, seed: int) -> None:
        words = []
        for callers in CALLERS:
            before = self._cpu_s(server.name)
            found = await server.closed(callers, self._closed_s(), seed)
            answers = max(1.0, found["rps"] * self._closed_s())
            cpu_us = (self._cpu_s(server.name) - before) / answers * 1e6
            self.closed.setdefault(server.name, {}).setdefault(callers, []).append(found["rps"])
            words.append(f"c={callers} {found['rps']:.1f}/s p50 {found['p50_s'] * 1e3:.1f} ms")
            quantiles = self.latency_s.setdefault(server.name, {}).setdefault(callers, {"p50": [], "p99": []})
            for quantile, values in quantiles.items():
                values.append(found[f"{quantile}_s"])
            if callers == 1:
                self.p50_s.setdefault(server.name, []).append(found["p50_s"])
            if cpu_us:
                self.report.figures.setdefault("server_cpu_us", {})[f"{server.name}_c{callers}"] = cpu_us
                words.append(f"({cpu_us:.0f} µs of the server's CPU)")
        self._say(f"{server.name}: {', '.join(words)}")

    def _cpu_s(self, name: str) -> float:
        pool = self._pools.get("rivals" if name in POLICIES[1:] else name.removesuffix("-oip"))
        return pool.cpu_s()[0] if pool is not None else 0.0

    def _closed_s(self) -> float:
        return 0.5 if self.plan.quick else 3.0

    async def _without(self, op: str, **words: Any) -> dict[str, Any]:
        await self._alone.command(op=op, **words)
        return await self._alone.line()

    # Telling

    def _show(self) -> None:
        lines = list(self._lines())
        table(("", "100 ms", "250 ms", *(f"c={callers}" for callers in CALLERS), "p50 c=1, ms"), lines)

    def _lines(self) -> Iterable[tuple[str, ...]]:
        for name in self._contenders:
            held = [self.rates.of(name, budget_s) for budget_s in BUDGETS_S]
            closed = [self.closed.get(name, {}).get(callers, []) for callers in CALLERS]
            p50_ms = [one * 1e3 for one in self.p50_s.get(name, [])]
            yield (
                name,
                *(f"{Spread.of(one):.0f}" if one else "-" for one in (*held, *closed)),
                (f"{Spread.of(p50_ms):.2f}" if p50_ms else "-"),
            )

    def _say(self, what: str) -> None:
        print(f"[{time.perf_counter() - self._began:5.0f} s] {what}", file=sys.stdout, flush=True)
