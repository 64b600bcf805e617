"""How long a streamed answer stands still when its target is lost in the middle, and whether every token is right.

A gateway stands before three edges, each a process with a worker of its own, and callers read streams without pause.
Again and again the edge that answers one of them is hit:

    worker     its worker is killed (SIGKILL): the edge says so
    edge       the edge is killed (SIGKILL): its connection ends
    stopped    the edge is stopped (SIGSTOP): its connection stays open and nothing more comes
    drained    the edge is shut down (SIGTERM)

The engines are paced, so that what is measured is the way and not the model: what the other edge has to compute before
its first token is known for each answer, with the prompts of the others that it goes on with at that moment. The gap is
the longest time between two events of one answer that was gone on with, as its caller sees it; what is left of it
without detection and that computation is *over*.
Each answer is compared with that of an engine that was not disturbed.

    python -m tests.bench.generate_resume [--quick] [--hits 200]
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
import yaml
from msgspec.structs import replace

from tests.bench.harness import Child, Goal, Report, parser, table
from tests.support.models.generative import TALKER
from tests.support.models.talking import save_talker
from tests.support.paced_generation import QUICK, write_pace
from tidegate import clock
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.engines.generation.paced_generation import PacedGenerativeEngine
from tidegate.estimate.quantiles import nearest_rank
from tidegate.generate.request import GenerateRequest
from tidegate.testing.ports import free_port

EDGES: Final = 3
STREAMS: Final = 3  # at a time
PROMPT, TOKENS = 48, 160
PREFILL_MS: Final = 0.25  # a token
CHUNK: Final = 64  # tokens of prompts in a step, so that other answers are not held up for long
STEP_MS: Final = 12.0
DETECTION_MS: Final = {"worker": 50.0, "edge": 50.0, "stopped": 250.0, "drained": 50.0}
ALLOWED_MS: Final = 50.0
KINDS: Final = ("worker", "worker", "edge", "stopped", "drained")  # in turn
VOCABULARY: Final = (0, 999)


@dataclass
class Edge:
    """One edge agent, which is started again when it has ended."""

    name: str
    config: Path
    log: Path
    child: Child | None = None
    life: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self) -> None:
        self.child = child = await self.life.enter_async_context(
            Child(self.name, "-m", "edge_agent", "--config", str(self.config), log=self.log)
        )
        while child.ready["event"] != "ready":
            child.ready = await child.line()

    async def again(self) -> None:
        await self.life.aclose()
        await self.start()

    async def end(self) -> None:
        await self.life.aclose()

    def hit(self, kind: str) -> None:
        assert self.child is not None
        if kind == "worker":
            for worker in psutil.Process(self.child.pid).children():
                if any("worker" in word for word in worker.cmdline()):
                    worker.kill()
        else:
            numbers = {"edge": signal.SIGKILL, "stopped": signal.SIGSTOP, "drained": signal.SIGTERM}
            self.child.signal(numbers[kind])


@dataclass
class Answer:
    """One answer as its caller saw it."""

    ids: list[int] = field(default_factory=list)
    gap_s: float = 0.0  # the longest between two events
    resumed: list[dict[str, str]] = field(default_factory=list)
    served_by: str = ""
    error: str = ""


@dataclass(frozen=True)
class Gap:
    """One answer that was gone on with once."""

    kind: str
    gap_ms: float
    expected_ms: float  # prompt and step of the target that went on
    grade: str

    @property
    def over_ms(self) -> float:
        return self.gap_ms - self.expected_ms - DETECTION_MS[self.kind]


class Caller:
    """Reads one answer after the other, and says where each is made."""

    def __init__(self, number: int, url: str, expected: Expected) -> None:
        self.number = number
        self.now: Answer | None = None
        self.ended: list[tuple[Answer, bool]] = []  # with whether its tokens are right
        self._url = url
        self._expected = expected
        self._random = random.Random(number)

    async def run(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set():
            prompt = [self._random.randrange(1000) for _ in range(PROMPT)]
            self.now = answer = Answer()
            try:
                await self._read(session, prompt, answer)
            except (aiohttp.ClientError, TimeoutError) as error:
                answer.error = f"{type(error).__name__}: {error}"
            self.now = None
            self.ended.append((answer, answer.ids == self._expected.ids(prompt)))

    async def pause(self) -> None:
        """Between two lines; a caller that reads without pause has none."""

    async def _read(self, session: aiohttp.ClientSession, prompt: list[int], answer: Answer) -> None:
        body = {"input_ids": prompt, "parameters": {"max_tokens": TOKENS, "ignore_eos": True}}
        async with session.post(self._url, json=body) as response:
            if response.status != 200:
                answer.error = (await response.text())[:200]
                await clock.sleep(0.2)
                return
            answer.served_by = response.headers["tidegate-served-by"]
            last_at = 0.0
            async for line in response.content:
                await self.pause()
                if line.startswith(b": tidegate-resumed "):
                    words = line.decode().split()[2:]
                    answer.resumed.append(dict(word.split("=", 1) for word in words))
                    answer.served_by = answer.resumed[-1]["to"]
                elif line.startswith(b"data: "):
                    said = json.loads(line[6:])
                    if "error" in said:
                        answer.error = str(said["error"])
                        return
                    now = time.perf_counter()
                    if said.get("output_ids"):
                        answer.gap_s = max(answer.gap_s, now - last_at if last_at else 0.0)
                        last_at = now
                        answer.ids += said["output_ids"]


class Expected:
    """What an engine that is not disturbed says."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._engine = PacedGenerativeEngine(
            write_pace(folder, replace(QUICK, prefill_ms=0.0, step_ms=((1.0, 1e-6),), ids=VOCABULARY, context=512)),
            limits=GenerationLimits(stop_tokens=TALKER.generative.stop_tokens if TALKER.generative else ()),
        )

    def ids(self, prompt: Sequence[int]) -> list[int]:
        self._engine.begin(1, GenerateRequest(tuple(prompt), TOKENS, ignore_stop=True))
        ids: list[int] = []
        while len(ids) < TOKENS:
            for progress in self._engine.step([1]):
                ids += progress.batch.ids if progress.batch is not None else ()
        return ids


def direct(_name: str, address: str) -> str:
    return address


async def start(
    stack: AsyncExitStack, scratch: Path, via: Callable[[str, str], str] = direct
) -> tuple[dict[str, Edge], str]:
    """The edges by the names of their targets, and the gateway's address.

    Args:
        via: of an edge's name and own address the one by which the gateway reaches it: a link's.
    """
    models = scratch / "models"
    steps = ((1.0, STEP_MS), (4.0, 1.2 * STEP_MS))
    save_talker(
        models, TALKER, steps, slots=8, cache_bytes=1024, prefill_ms=PREFILL_MS, prefill_chunk=CHUNK, ids=VOCABULARY
    )
    edges: dict[str, Edge] = {}
    for number in range(EDGES):
        name = f"e{number}"
        words = {
            "name": name,
            "grpc_port": free_port(),
            "http_port": None,
            "model_repository": str(models),
            "state_dir": str(scratch / name),
            "warmup_budget_s": 0.3,
            "log_level": "error",
        }
        config = scratch / f"{name}.yaml"
        config.write_text(yaml.safe_dump(words))
        edge = edges[f"edge/{name}"] = Edge(name, config, scratch / f"{name}.log")
        stack.push_async_callback(edge.end)
        await edge.start()
    targets = [
        {"name": one.name, "tier": "edge", "address": via(one.name, one.child.ready["addresses"]["grpc"])}
        for one in edges.values()
        if one.child is not None
    ]
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
    config = scratch / "gateway.yaml"
    config.write_text(
        yaml.safe_dump(
            {"name": "bench", "model_repository": str(models), "log_level": "error", "targets": targets, **ports}
        )
    )
    gateway = await stack.enter_async_context(
        Child("gateway", "-m", "gateway", "--config", str(config), log=scratch / "gateway.log")
    )
    return edges, str(gateway.ready["addresses"]["http"])


async def hit_one(edges: dict[str, Edge], callers: Sequence[Caller], kind: str, chance: random.Random) -> list[Gap]:
    """Hit the edge of an answer under way, and wait until all that it answered have ended."""
    target, met = await under_way(edges, callers, chance)
    edge = edges[target]
    edge.hit(kind)
    give_up_at = time.perf_counter() + 20.0
    while any(answer is caller.now for caller, answer in met) and time.perf_counter() < give_up_at:
        await clock.sleep(0.02)
    if kind == "stopped":
        assert edge.child is not None
        edge.child.signal(signal.SIGCONT)
    elif kind != "worker":
        await edge.again()
    await clock.sleep(2.0)  # until it is used again
    moved = [answer for _, answer in met if len(answer.resumed) == 1 and not answer.error]
    return [gap_of(kind, answer, moved) for answer in moved if answer.resumed[0]["from"] == target]


def gap_of(kind: str, answer: Answer, moved: Sequence[Answer]) -> Gap:
    """Args: moved: all that were hit with it."""
    by = answer.resumed[0]["to"]
    tokens = sum(PROMPT + int(one.resumed[0]["at"]) for one in moved if one.resumed[0]["to"] == by)
    expected_ms = tokens * PREFILL_MS + ceil(tokens / CHUNK) * STEP_MS
    return Gap(kind, 1e3 * answer.gap_s, expected_ms, answer.resumed[0]["grade"])


async def under_way(
    edges: dict[str, Edge], callers: Sequence[Caller], chance: random.Random
) -> tuple[str, list[tuple[Caller, Answer]]]:
    """An edge that answers, when the answer of one of its callers has so many tokens; and all of its answers."""
    while True:
        caller = chance.choice(callers)
        wanted = chance.randrange(20, TOKENS - 20)
        give_up_at = time.perf_counter() + 5.0
        while time.perf_counter() < give_up_at:
            answer = caller.now
            if answer is not None and len(answer.ids) >= wanted and answer.served_by in edges:
                target = answer.served_by
                met = [(one, one.now) for one in callers if one.now is not None and one.now.served_by == target]
                return target, [(one, answer) for one, answer in met if answer is not None and answer.ids]
            await clock.sleep(0.005)


def judge(report: Report, gaps: Sequence[Gap], callers: Sequence[Caller], hits: int) -> None:
    ended = [one for caller in callers for one in caller.ended]
    report.figures |= {
        "hits": hits,
        "answers": len(ended),
        "resumed": sum(bool(answer.resumed) for answer, _ in ended),
        "errors": sum(bool(answer.error) for answer, _ in ended),
        "wrong": sum(not right and not answer.error for answer, right in ended),
        "exact": sum(one.grade == "exact" for one in gaps) / max(1, len(gaps)),
    }
    rows = []
    for kind in DETECTION_MS:
        found = [one for one in gaps if one.kind == kind]
        if not found:
            continue
        gap, over = sorted(one.gap_ms for one in found), sorted(one.over_ms for one in found)
        allowed = sorted(2.0 * (DETECTION_MS[kind] + one.expected_ms + ALLOWED_MS) - one.gap_ms for one in found)
        figures = {
            "answers": len(found),
            "gap_p50_ms": nearest_rank(gap, 0.5),
            "gap_p99_ms": nearest_rank(gap, 0.99),
            "over_p50_ms": nearest_rank(over, 0.5),
            "over_p99_ms": nearest_rank(over, 0.99),
            "within_twice": sum(one >= 0.0 for one in allowed) / len(allowed),
        }
        report.figures[kind] = figures
        rows.append((kind, *[f"{value:.1f}" for value in figures.values()]))
        report.goal(Goal(f"{kind}_over_p50_ms", figures["over_p50_ms"], ALLOWED_MS, "<="))
        report.goal(Goal(f"{kind}_within_twice_the_aim", figures["within_twice"], 0.99))
    table(("", "answers", "gap p50 ms", "p99", "over p50 ms", "p99", "within twice"), rows)
    report.goal(Goal("tokens_lost_doubled_or_other", report.figures["wrong"], 0, "<="))
    report.goal(Goal("errors", report.figures["errors"], 0, "<="))
    report.goal(Goal("exact_share", report.figures["exact"], 1.0))


async def bench(hits: int) -> Report:
    config = {"hits": hits, "edges": EDGES, "streams": STREAMS, "step_ms": STEP_MS, "prefill_ms": PREFILL_MS}
    report = Report("generate_resume", {**config, "prompt": PROMPT, "tokens": TOKENS})
    chance, gaps = random.Random(17), list[Gap]()
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        edges, address = await start(stack, scratch)
        expected, stop = Expected(scratch / "expected"), asyncio.Event()
        url = f"{address}/v2/models/talker/generate_stream"
        callers = [Caller(number, url, expected) for number in range(STREAMS)]
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)))
        running = [asyncio.create_task(one.run(session, stop), name=f"caller {one.number}") for one in callers]
        await clock.sleep(5.0)  # usual gaps are known by then
        for number in range(hits):
            gaps += await hit_one(edges, callers, KINDS[number % len(KINDS)], chance)
            if number % 10 == 9:
                print(f"{number + 1} of {hits} hits, {len(gaps)} gaps", file=sys.stderr, flush=True)
        stop.set()
        await asyncio.gather(*running)
        for answer, right in [one for caller in callers for one in caller.ended]:
            if answer.error or not right:
                print(answer.error or f"wrong: {answer.resumed}", file=sys.stderr)
    judge(report, gaps, callers, hits)
    return report


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--hits", type=int, help="times that an edge is hit")
    chosen: Any = options.parse_args()
    asyncio.run(bench(chosen.hits or (15 if chosen.quick else 200))).write()


if __name__ == "__main__":
    main()
