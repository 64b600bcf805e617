"""Random lives from a seed: the same seed is the same run, and a run that fails shrinks to the steps that it needs.

A script is a profile and a list of steps, each with its three numbers, all drawn before anything happens. Playing it
draws nothing more. So leaving a step out changes nothing about the numbers of the others, and a failing script is
shrunk by dropping steps for as long as the same check still fails (Zeller's ddmin, down to single steps). What is left
is told as the numbers of its steps: `--replay SEED --steps 0,17-19` is the whole case.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from tests.support.interleave.draws import Profile, profile_of
from tests.support.interleave.world import World

Happening = Callable[[World, float, float, float], None]
STEPS: Final = 800

# How often each is drawn, against the others.
HAPPENINGS: Final[dict[Happening, int]] = {
    World.time_passes: 16,
    World.request_arrives: 9,
    World.attempt_is_accepted: 12,
    World.attempt_begins: 4,
    World.attempt_answers: 10,
    World.attempt_fails: 6,
    World.timer_rings: 7,
    World.replaced_timer_rings: 5,
    World.caller_leaves: 1,
    World.old_news_comes: 6,
    World.link_comes_up: 6,
    World.link_goes_down: 1,
    World.load_is_reported: 6,
    World.link_is_measured: 5,
    World.target_comes: 4,
    World.target_goes: 1,
    World.target_sours: 2,
    World.sour_target_fails: 9,
    World.overload_turns: 1,
}
_DRAWN: Final = tuple(step for step, weight in HAPPENINGS.items() for _ in range(weight))


class Step(NamedTuple):
    happening: Happening
    x: float
    y: float
    z: float

    def __str__(self) -> str:
        return f"{self.happening.__name__}({self.x:.3f}, {self.y:.3f}, {self.z:.3f})"


class Script(NamedTuple):
    profile: Profile
    steps: tuple[Step, ...]


class Broken(NamedTuple):
    """The check that failed: `where` tells one from another."""

    where: str
    words: str
    step: int  # the one after which it failed; the number of steps when it was the drain


@dataclass
class Lived:
    """What many runs went through."""

    lives: int = 0
    events: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    orders: set[int] = field(default_factory=set)  # of events, each different one once

    def add(self, world: World) -> None:
        self.lives += len(world.signatures)
        self.counts += world.counts
        self.orders.update(world.signatures)


def script_of(seed: int, steps: int = STEPS) -> Script:
    draw = Random(seed).random
    profile = profile_of(draw(), draw(), draw())
    kinds = len(_DRAWN)
    return Script(profile, tuple(Step(_DRAWN[int(draw() * kinds)], draw(), draw(), draw()) for _ in range(steps)))


def play(script: Script, lived: Lived | None = None) -> Broken | None:
    """Let the script happen; returns the check that failed, if one did."""
    number = 0
    try:
        world = World(script.profile)
        for number, step in enumerate(script.steps):  # noqa: B007  # read where one fails
            step.happening(world, step.x, step.y, step.z)
            world.check()
        number = len(script.steps)
        world.drain()
    except Exception as error:  # whatever goes wrong is a finding: a KeyError in a ledger is a counter lost
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {frame.name}, line {frame.lineno} of {frame.filename.rpartition('/')[2]}"
        return Broken(where, str(error), number)
    if lived is not None:
        lived.add(world)
        lived.events += len(script.steps)
    return None


def shrunk(script: Script, broken: Broken) -> list[int]:
    """The numbers of the steps that are enough to break the same check."""
    kept, before = list(range(min(broken.step + 1, len(script.steps)))), -1
    while len(kept) != before:  # what could not be left out may be, once others are
        before, size = len(kept), max(1, len(kept) // 2)
        while size:
            kept, size = _without(script, broken, kept, size), size // 2
    return kept


def _without(script: Script, broken: Broken, kept: list[int], size: int) -> list[int]:
    """Those steps, without every stretch of this size that is not needed."""
    start = 0
    while start < len(kept):
        fewer = kept[:start] + kept[start + size :]
        found = play(only(script, fewer))
        if found is not None and found.where == broken.where:
            kept = fewer
        else:
            start += size
    return kept


def only(script: Script, numbers: Iterable[int]) -> Script:
    return script._replace(steps=tuple(script.steps[number] for number in numbers))


def spans(numbers: Sequence[int]) -> str:
    """Step numbers in words: "0,17-19"."""
    words: list[str] = []
    first = 0
    for index, number in enumerate(numbers):
        if index + 1 < len(numbers) and numbers[index + 1] == number + 1:
            continue
        words.append(str(number) if numbers[first] == number else f"{numbers[first]}-{number}")
        first = index + 1
    return ",".join(words)


def numbers_of(words: str) -> list[int]:
    """The other way round."""
    ends = [[int(end) for end in span.split("-")] for span in words.split(",") if span]
    return [number for span in ends for number in range(span[0], span[-1] + 1)]
