"""How long a worker may be silent while it generates: by what its own steps and prompts have taken.

A worker tells of every step that brought a token, and now and then of one that brought none. So the time between two
signs is about that of a step, and a prompt's first token takes what prompts of its size have taken where the engine
computes them in one piece.

    patience = patience_s(p99 of the last steps) + RATIO × tokens of the longest prompt × p99 of its seconds a token

As everywhere (`tidegate/workers/watchdog.py`), before anything is known there is no patience to go by: inf, and the
caller's own limit holds.

Pure. It can be wrong where a batch becomes much larger within one step than any of the last `STEPS`.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

from tidegate.estimate.quantiles import nearest_rank
from tidegate.workers.watchdog import RATIO, patience_s

STEPS: Final = 256
PROMPTS: Final = 64
FEWEST_STEPS: Final = 16
P99: Final = 0.99


class WorkerSilence:
    """Mutable: `begin` when something is owed from now on, `sign` with each sign of life, `prompt` with each start."""

    __slots__ = ("_prompts", "_since", "_steps")

    def __init__(self) -> None:
        self._since = 0.0
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._prompts: deque[float] = deque(maxlen=PROMPTS)  # seconds a token

    def begin(self, now: float) -> None:
        self._since = now

    def sign(self, now: float, step_s: float = 0.0) -> None:
        """A sign of life; of a step that took `step_s`, or of something else."""
        self._since = now
        if step_s > 0.0:
            self._steps.append(step_s)

    def prompt(self, tokens: int, seconds: float) -> None:
        """A prompt of which so many tokens were computed has taken so long."""
        if tokens > 0 and seconds >= 0.0:
            self._prompts.append(seconds / tokens)

    def silent_s(self, now: float) -> float:
        return max(0.0, now - self._since)

    def patience_s(self, prompt_tokens: int) -> float:
        """Args: prompt_tokens: of the longest prompt that has not started; 0 where all have."""
        if len(self._steps) < FEWEST_STEPS or (prompt_tokens and not self._prompts):
            return inf
        prompt_s = RATIO * prompt_tokens * nearest_rank(sorted(self._prompts), P99) if prompt_tokens else 0.0
        return patience_s(nearest_rank(sorted(self._steps), P99)) + prompt_s

    def __repr__(self) -> str:
        return f"<WorkerSilence since {self._since:.3f}, {len(self._steps)} steps known>"
