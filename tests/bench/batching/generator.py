"""The load: rows sent at their instants however the last ones fared, or by so many callers one after another.

A process of its own, on the core that is not measured. Latency counts from the scheduled instant, so a generator that
lags, or a server that makes it lag, gains nothing by it; how late requests left is told with the answers. A run that
can no longer come out well (`give_up_after` misses) is ended, and the server is asked until it has worked off what is
left.

Speaks the harness's JSON lines; `{"op": "open" | "closed" | "check", "target": {"kind", "port", "model"}, ...}`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import numpy as np
import uvloop

from tests.bench.batching.targets import Asked, Seen, opened
from tests.bench.batching.texts import Due, Row, read_rows, schedule
from tidegate import clock

_LEAD_S: Final = 0.1
_CALM_S: Final = 0.05  # a lone row answered so soon: nothing is left of the run before
_CALM_TRIES: Final = 10


@dataclass(slots=True)
class One:
    """What became of one request. Instants count from the beginning of the run."""

    due: Due
    length: int
    done_at: float
    seen: Seen

    @property
    def latency_s(self) -> float:
        """From the scheduled instant; 1e9 without an answer."""
        return self.done_at - self.due.at if self.seen.answered else 1e9

    def plain(self) -> dict[str, Any]:
        seen = self.seen
        return {
            "at": self.due.at, "length": self.length, "done_at": self.done_at, "answered": seen.answered,
            "refused": seen.refused, "queue_s": seen.queue_s, "compute_s": seen.compute_s, "batch": seen.batch_size,
        }  # fmt: skip


class Generator:
    """Targets stay connected from their first use."""

    def __init__(self, rows: dict[str, list[Row]], stack: AsyncExitStack) -> None:
        self._rows = rows
        self._stack = stack
        self._targets: dict[tuple[str, int, str], Asked] = {}

    async def obey(self, op: str, target: dict[str, Any], **words: Any) -> dict[str, Any]:
        asked = await self._target(**target)
        await self._calm(asked)
        match op:
            case "open":
                return await self._open(asked, **words)
            case "closed":
                return await self._closed(asked, **words)
            case "check":
                return await self._check(asked, **words)
        raise ValueError(f"no such op: {op}")

    async def _target(self, kind: str, port: int, model: str) -> Asked:
        key = (kind, port, model)
        if key not in self._targets:
            self._targets[key] = await self._stack.enter_async_context(opened(kind, port, model))
        return self._targets[key]

    async def _calm(self, asked: Asked) -> None:
        """Wait until nothing is left of the run before, and forget our own rubbish."""
        gc.collect()
        for _ in range(_CALM_TRIES):
            began_at = clock.now()
            await asked.ask(self._rows["mixed"][0][:8], 3.0)
            if clock.now() - began_at < _CALM_S:
                return

    async def _open(
        self, asked: Asked, rate: float, seconds: float, seed: int, budget_s: float, counted_s: float = 0.0,
        mix: str = "mixed", give_up_after: float = 1e9, into: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """`counted_s`: a miss is what takes longer than this; `budget_s` is what the server is told."""
        rows, due = self._rows[mix], schedule(seed, rate, seconds)
        began_at, over = clock.now() + _LEAD_S, asyncio.Event()
        found, late_s, misses = list[One](), list[float](), 0
        counted_s = counted_s or budget_s

        async def call(one: Due) -> None:
            nonlocal misses
            sent_at = clock.now()
            late_s.append(sent_at - began_at - one.at)
            seen = await asked.ask(rows[one.row], began_at + one.at + budget_s - sent_at)
            found.append(One(one, len(rows[one.row]), clock.now() - began_at, seen))
            misses += found[-1].latency_s > counted_s
            if misses > give_up_after:
                over.set()

        async def send() -> None:
            async with asyncio.TaskGroup() as calls:
                for one in due:
                    await clock.sleep_until(began_at + one.at)
                    calls.create_task(call(one))

        sending = asyncio.create_task(send(), name="arrivals")
        giving_up = asyncio.create_task(over.wait(), name="giving up")
        await asyncio.wait((sending, giving_up), return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, giving_up):
            task.cancel()
        await asyncio.gather(sending, giving_up, return_exceptions=True)
        if into:
            words = json.dumps([one.plain() for one in found])
            await asyncio.to_thread(Path(into).write_text, words)
        return {
            "due": len(due),
            "latencies_s": [round(one.latency_s, 6) for one in found],
            "given_up": over.is_set(),
            "late_p99_s": _quantile(late_s, 99),
        }

    async def _closed(self, asked: Asked, callers: int, seconds: float, seed: int) -> dict[str, Any]:
        rows, due = self._rows["mixed"], iter(schedule(seed, 1000.0, 60.0))
        latencies_s, failed = list[float](), 0
        began_at = clock.now()

        async def caller() -> None:
            nonlocal failed
            while clock.now() < began_at + seconds:
                sent_at = clock.now()
                seen = await asked.ask(rows[next(due).row], 30.0)
                failed += not seen.answered
                latencies_s.append(clock.now() - sent_at)

        await asyncio.gather(*[caller() for _ in range(callers)])
        elapsed_s = clock.now() - began_at
        rps = (len(latencies_s) - failed) / elapsed_s
        p50, p99 = _quantile(latencies_s, 50), _quantile(latencies_s, 99)
        return {"rps": rps, "p50_s": p50, "p99_s": p99, "failed": failed}

    async def _check(self, asked: Asked, answers: str) -> dict[str, Any]:
        """The worst cosine between what the server says and what the model says, over so many rows sent at once."""
        true = np.load(answers)
        seen = await asyncio.gather(*[asked.ask(row, 30.0) for row in self._rows["mixed"][: len(true)]])
        told = np.stack([np.frombuffer(one.embedding or bytes(true[0].nbytes), np.float32) for one in seen])
        return {"cosine": float(np.min(np.sum(told * true, axis=1)))}  # both are of length 1


def _quantile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1] if len(values) > 1 else max(values, default=0.0)


async def main(rows: str) -> None:
    async with AsyncExitStack() as stack:
        generator = Generator(read_rows(Path(rows)), stack)
        gc.freeze()
        print(json.dumps({"event": "ready"}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await generator.obey(**json.loads(line))), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
