"""The timeline of a link: a scenario is applied to it, and one task carries out the scenario's steps.

Steps are laid out as (instant, what to do) in order of time, lazily, since some repeat for ever; the end of a step is a
step too. A partition that ends heals the link only if it is still the one that is there: an order by hand, or a later
step, is not undone by an earlier one's end.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tidegate import clock
from tidegate.netsim.proxy.link import LinkProxy
from tidegate.netsim.proxy.scenario import LinkStep, LoadedLinkScenario


class _Due(NamedTuple):
    at_s: float
    order: int
    act: Callable[[], None]


class LinkTimeline:
    """Use `async with`; then `play` a scenario, and another in its place. One at a time."""

    def __init__(self, link: LinkProxy) -> None:
        self.link = link
        self.playing: LoadedLinkScenario | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LinkTimeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        task = self._task
        self.stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def play(self, loaded: LoadedLinkScenario) -> None:
        """Make the link like this, whole and healed, and begin with the first step.

        Raises:
            LinkError: a file that the scenario names cannot be read; nothing has changed then.
        """
        numbered = enumerate(loaded.scenario.timeline, 1)
        steps = [_Acts(self.link, loaded, step, f"step-{number}") for number, step in numbered]
        put_on = loaded.ready_for(self.link)
        self.stop()
        put_on()
        self.playing = loaded
        if steps:
            self._task = asyncio.create_task(_carry_out(steps), name=f"timeline of {self.link.name}")

    def stop(self) -> None:
        """No further steps. The link stays as it is."""
        self.playing = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def __repr__(self) -> str:
        return f"<LinkTimeline {self.playing.name if self.playing else 'idle'} on {self.link!r}>"


async def _carry_out(steps: list[_Acts]) -> None:
    began_at = clock.now()
    numbers = itertools.count()
    for due in heapq.merge(*(acts.dues(numbers) for acts in steps)):
        await clock.sleep_until(began_at + due.at_s)
        due.act()


class _Acts:
    """One step of a scenario: begins, ends, and does so again."""

    def __init__(self, link: LinkProxy, loaded: LoadedLinkScenario, step: LinkStep, name: str) -> None:
        self._link = link
        self._step = step
        self._name = name
        self._toxic = loaded.ready(step.toxic) if step.toxic is not None else None
        self._mine = 0

    def dues(self, numbers: Iterator[int]) -> Iterator[_Due]:
        """All that this step does, in order of time; ties in order of the file."""
        step = self._step
        rounds = itertools.count() if step.every_s is not None and step.times is None else range(step.times or 1)
        for number in rounds:
            at_s = step.at_s + number * (step.every_s or 0.0)
            yield _Due(at_s, next(numbers), self._begin)
            if step.for_s is not None:
                yield _Due(at_s + step.for_s, next(numbers), self._end)

    def _begin(self) -> None:
        step = self._step
        if self._toxic is not None and step.toxic is not None:
            profile, traces = self._toxic
            self._link.put(self._name, profile, step.toxic.direction, traces=traces)
        elif step.partition is not None:
            self._mine = self._link.partition(step.partition, step.direction)

    def _end(self) -> None:
        if self._toxic is None:
            self._link.heal(only=self._mine)
        elif self._name in self._link.toxics:
            self._link.remove(self._name)

    def __repr__(self) -> str:
        return f"<_Acts {self._step!r}>"
