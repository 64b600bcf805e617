"""The overview is the keeper's view of all processes of its gateway, by which it answers operators for all of them.

    who they are         the parent's list of members, with what each worker says of itself every second
    decisions            asked of every worker when an operator asks, by its own socket, and merged
    the console's rates  each worker's ends of requests, told as it moves them into its own statistics
    trials               each worker's counts since the last second

What a worker tells is lost with it for the last second at most; its remembered decisions are lost with it for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec
import structlog
from aiohttp import web
from prometheus_client.metrics_core import Metric

from gateway.core.estimate.sliding_stats import Ending
from gateway.operate.console.history import ConsoleHistory, Ends
from gateway.workers.messages import Member
from gateway.workers.process_part import ProcessPart, WorkerWord
from tidegate import clock
from tidegate.metrics.families import counter, gauge

ANSWERS_WITHIN_S: Final = 4.0
FRESH_S: Final = 5.0
log = structlog.get_logger(__name__)


class WorkerEnds(msgspec.Struct, frozen=True):
    """Ends of requests by kind, of one stretch of a worker's time. `rows`: the kind's parts, then how many."""

    at: float
    rows: list[tuple[str, int, str, str, Ending, int, int]]

    @classmethod
    def of(cls, at: float, ends: Ends) -> WorkerEnds:
        return cls(at, [(*kind, times) for kind, times in ends.items()])


class WorkersOverview:
    """Mutable: what was last heard of each worker."""

    def __init__(self, part: ProcessPart) -> None:
        self._part = part
        self._words: dict[str, tuple[WorkerWord, float]] = {}
        self.restart_all = part.restart_all

    def hear(self, watch: ConsoleHistory | None) -> None:
        """Begin to take what workers tell."""
        self._part.hear(WorkerWord, self._take)
        if watch is not None:
            self._part.hear(WorkerEnds, lambda _by, said: watch.add_counts(said.at, _ends(said)))

    def _take(self, by: str, said: WorkerWord) -> None:
        self._words[by] = (said, clock.now())

    @property
    def fresh(self) -> dict[str, WorkerWord]:
        """What those workers say that live."""
        since = clock.now() - FRESH_S
        return {name: word for name, (word, at) in self._words.items() if at >= since}

    @property
    def in_flight(self) -> int:
        return sum(one.in_flight for one in self.fresh.values())

    @property
    def by_target(self) -> dict[str, int]:
        """Requests in flight from all workers."""
        found: dict[str, int] = {}
        for word in self.fresh.values():
            for target, count in word.by_target.items():
                found[target] = found.get(target, 0) + count
        return found

    def admission(self) -> dict[str, Any]:
        """The console's figures of what is let in."""
        words = self.fresh.values()
        return {
            "in_flight": sum(one.in_flight for one in words),
            "limit": sum(one.limit for one in words),
            "overloaded": any(one.overloaded for one in words),
            "shed": sum(one.shed for one in words),
        }

    def members(self) -> list[dict[str, Any]]:
        """Each process: who it is, whether it serves, and what it does."""
        words = self.fresh
        rows = []
        since_s = clock.now() - self._part.members_at  # the parent says who there is when that changes
        for one in self._part.members:
            word = words.get(one.name)
            row: dict[str, Any] = {
                "name": one.name,
                "role": one.role,
                "pid": one.pid,
                "state": one.state,
                "up_s": round(one.up_s + since_s, 1) if one.pid else 0.0,
                "ended": one.ended,
                "why": one.why,
            }
            if word is not None:
                row |= {"in_flight": word.in_flight, "connections": word.connections, "answered": word.answered}
            rows.append(row)
        return rows

    def families(self) -> list[Metric]:
        """The metrics of the processes themselves."""
        return process_families(self._part.members, self._part.part.counted)

    async def decisions(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """What the workers remember of requests, each in its own order; of one that does not answer, nothing."""
        names, words = zip(*self.fresh.items(), strict=True) if self.fresh else ((), ())
        answers = await asyncio.gather(*(_asked(word.admin, query) for word in words), return_exceptions=True)
        found: list[dict[str, Any]] = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, BaseException):
                log.warning("a worker does not say what it remembers", process=name, why=str(answer))
            else:
                found += [{**one, "process": name} for one in answer]
        return found

    def routes(self) -> list[web.RouteDef]:
        """GET /v1/workers says who they are; POST /v1/workers/restart has all restarted in turn."""

        async def who(_request: web.Request) -> web.Response:
            return web.json_response({"workers": self.members()})

        async def restart(_request: web.Request) -> web.Response:
            self.restart_all()
            return web.json_response({"restarting": [one.name for one in self._part.members]}, status=202)

        return [web.get("/v1/workers", who), web.post("/v1/workers/restart", restart)]

    def __repr__(self) -> str:
        return f"<WorkersOverview of {len(self._part.members)}>"


async def _asked(path: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=ANSWERS_WITHIN_S)
    connector = aiohttp.UnixConnector(path)
    asked = {**query, "dated": "1"}
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        session.get("http://localhost/debug/decisions", params=asked) as answer,
    ):
        answer.raise_for_status()
        decisions: list[dict[str, Any]] = msgspec.json.decode(await answer.read())["decisions"]
        return decisions


def _ends(said: WorkerEnds) -> Ends:
    return {(model, priority, by, why, ending, bucket): n for model, priority, by, why, ending, bucket, n in said.rows}


def process_families(members: Sequence[Member], counted: Mapping[str, int]) -> list[Metric]:
    """The metrics of a gateway's processes.

    Args:
        counted: ends by process that a keeper before has counted. What it counted outlives it, and is added to these
            (`tidegate/metrics/sharing.py`); an end in the second after its last snapshot may be lost.
    """
    up = [((one.name,), float(one.state == "ready")) for one in members]
    ended = [((one.name,), float(max(0, one.ended - counted.get(one.name, 0)))) for one in members]
    return [
        gauge("tidegate_gateway_process_up", "Whether a process of the gateway serves (`workers`).", ("name",), up),
        counter("tidegate_gateway_process_ends", "Ends of a process that were not asked for.", ("name",), ended),
    ]
