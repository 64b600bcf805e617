"""Requests at their instants, however the last ones fared, and the instants of the tokens of each answer.

A schedule is a file of JSON that says when to ask for what. Callers are processes (`http_callers.py`,
`litellm_callers.py`) that take one line of JSON a run and answer with one; what was heard goes to a file. Imports
nothing but the standard library and the clock, since LiteLLM has an environment of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tidegate import clock

MODEL: Final = "talker"
GRACE_S: Final = 1.0  # beyond its budget, until a silent request counts as lost


@dataclass(frozen=True)
class Asked:
    """One request of a schedule. `tokens`: those that its answer has, which callers do not know."""

    number: int
    at: float
    kind: str
    prompt: tuple[int, ...]
    tokens: int
    max_tokens: int
    ttft_s: float
    tpot_s: float
    budget_s: float

    def body(self) -> dict[str, Any]:
        """Of OpenAI's completions."""
        return {
            "model": MODEL, "prompt": list(self.prompt), "max_tokens": self.max_tokens, "temperature": 0,
            "stream": True,
        }  # fmt: skip

    def headers(self) -> dict[str, str]:
        return {
            "tidegate-ttft-ms": f"{1e3 * self.ttft_s:g}",
            "tidegate-tpot-ms": f"{1e3 * self.tpot_s:g}",
            "tidegate-budget-ms": f"{1e3 * self.budget_s:g}",
        }


@dataclass
class Heard:
    """One answer as its caller saw it; instants in seconds after the request was due."""

    number: int
    tokens_at: list[float] = field(default_factory=list)
    whole: bool = False  # ended with a reason
    served_by: str = ""
    route: str = ""
    resumed: int = 0
    late_s: float = 0.0  # by which it was sent
    error: str = ""


Ask = Callable[[Asked, Heard, Callable[[], float]], Awaitable[None]]


async def play(due: Sequence[Asked], began_at: float, ask: Ask) -> list[Heard]:
    """One run: what was heard of each request."""
    gc.collect()
    return await asyncio.gather(*[_one(asked, began_at, ask) for asked in due])


async def _one(asked: Asked, began_at: float, ask: Ask) -> Heard:
    heard = Heard(asked.number)
    due_at = began_at + asked.at
    await clock.sleep_until(due_at)
    heard.late_s = clock.now() - due_at
    try:
        async with asyncio.timeout(asked.budget_s + GRACE_S):
            await ask(asked, heard, lambda: round(clock.now() - due_at, 5))
    except TimeoutError:
        heard.error = "silent beyond its budget"
    except Exception as error:  # any of a foreign client's
        heard.error = f"{type(error).__name__}: {error}"[:300]
    return heard


async def serve(ask_of: Callable[[dict[str, Any]], Ask]) -> None:
    """Runs, one for each line of JSON on stdin: `schedule`, `answers`, `began_at`, and what `ask_of` wants."""
    print(json.dumps({"event": "ready"}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        words = json.loads(line)
        schedule, answers, began_at = Path(words.pop("schedule")), Path(words.pop("answers")), words.pop("began_at")
        due = [Asked(**one) for one in json.loads(await loop.run_in_executor(None, schedule.read_text))]
        heard = await play(due, began_at, ask_of(words))
        await loop.run_in_executor(None, answers.write_text, json.dumps([asdict(one) for one in heard]))
        late = sorted(one.late_s for one in heard) or [0.0]
        told = {"requests": len(heard), "late_p99_s": late[int(0.99 * (len(late) - 1))]}
        print(json.dumps(told), flush=True)
