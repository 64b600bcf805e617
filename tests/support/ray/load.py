"""Requests to a gateway at a steady rate, of which each is counted by the phase in which it was sent."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp

from tidegate import clock

MODEL: Final = "steps"


class Load:
    """Requests at a rate, whatever becomes of them; counted by the phase in which they were sent.

    Args:
        rate: of requests a second.
        budget_s: of each request.
    """

    def __init__(self, url: str, rate: float, budget_s: float) -> None:
        self._url, self._rate = url, rate
        self._budget = {"tidegate-budget-ms": f"{1e3 * budget_s:.0f}"}
        self.phase = "calm"
        self.sent: dict[str, int] = {}
        self.failed: dict[str, list[str]] = {}
        self.slowest_s: dict[str, float] = {}

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as calls:
            while True:
                calls.create_task(self._call(session))
                await clock.sleep(1.0 / self._rate)

    async def _call(self, session: aiohttp.ClientSession) -> None:
        phase, began_at = self.phase, clock.now()
        self.sent[phase] = self.sent.get(phase, 0) + 1
        body = {
            "inputs": [
                {"name": name, "shape": [1, 4], "datatype": "INT64", "data": [1, 1, 1, 1]}
                for name in ("input_ids", "attention_mask")
            ]
        }
        try:
            async with session.post(self._url, json=body, headers=self._budget) as answer:
                if answer.status != 200:
                    self.failed.setdefault(phase, []).append(f"{answer.status}: {(await answer.text())[:200]}")
        except aiohttp.ClientError as error:
            self.failed.setdefault(phase, []).append(f"{type(error).__name__}: {error}")
        self.slowest_s[phase] = max(self.slowest_s.get(phase, 0.0), clock.now() - began_at)

    def __repr__(self) -> str:
        return f"<Load {self.phase}: {self.sent} sent, {self.failed} failed>"
