"""The long run: `make fuzz`, or `python -m tests.fuzz [TARGET …]`. Random, for FUZZ_MINUTES (10 without).

Targets take turns, a few hundred throws each. What breaks one is kept twice in FUZZ_DIR (`.fuzz` without): in words,
for a person to paste into a test, and in Hypothesis' own database, so that the next run begins with it. Ends with 1 if
anything broke.

`openapi` is a turn like the others, and a process of another environment: schemathesis, which says its seed in the
words that are kept. Where `make checks` could not set it up, a run of everything says so and goes on without it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz import openapi
from tests.fuzz.target import Target, run
from tests.fuzz.test_fuzz import TARGETS
from tidegate import clock

TURN = 300  # throws
OPENAPI_TURN_S = 60.0
Turn = Callable[[dict[str, int]], bool]  # counts its throws; whether the target held


def main(names: list[str]) -> int:
    folder = Path(os.environ.get("FUZZ_DIR", ".fuzz"))
    folder.mkdir(parents=True, exist_ok=True)
    until = clock.now() + 60.0 * float(os.environ.get("FUZZ_MINUTES", "10"))
    turns = {name: turn for name, turn in _turns(folder, until).items() if not names or name in names}
    if not turns:
        known = ", ".join((*(one.name for one in TARGETS), openapi.NAME))
        print(f"no such target; there are {known}", file=sys.stderr)
        return 2
    print(f"{len(turns)} targets; what breaks one is kept in {folder.resolve()}", flush=True)
    broken: dict[str, int] = {}
    thrown = dict.fromkeys(turns, 0)
    while clock.now() < until:
        for name, turn in turns.items():
            if clock.now() >= until:
                break
            if not turn(thrown):
                broken[name] = broken.get(name, 0) + 1
            left_min = max(0.0, until - clock.now()) / 60.0
            print(f"{name:16} {thrown[name]:8} thrown, {len(broken)} broken, {left_min:.1f} min left", flush=True)
    print(f"{sum(thrown.values())} thrown; broken: {', '.join(broken) or 'none'}")
    return 1 if broken else 0


def _turns(folder: Path, until: float) -> dict[str, Turn]:
    turns: dict[str, Turn] = {one.name: partial(_turn, one, folder) for one in TARGETS}
    if openapi.TOOL.exists():
        turns[openapi.NAME] = lambda thrown: _conforms(folder, until, thrown)
    else:
        print("openapi is left out: `make checks` has not set up schemathesis here", file=sys.stderr)
    return turns


def _conforms(folder: Path, until: float, thrown: dict[str, int]) -> bool:
    """Whether the gateway answered as its document says, for as long as a turn lasts."""
    with tempfile.TemporaryDirectory() as scratch:
        status, told, count = asyncio.run(
            _asked(Path(scratch), max(1, round(min(OPENAPI_TURN_S, until - clock.now()))))
        )
    thrown[openapi.NAME] += count
    return status == 0 or _kept(folder, openapi.NAME, told)


async def _asked(scratch: Path, for_s: int) -> tuple[int, str, int]:
    async with openapi.answering(scratch) as (gateway, _):
        status, told = await openapi.conformance(scratch, gateway.addresses["http"], most_examples=TURN, for_s=for_s)
    return status, told, openapi.asked(told)


def _turn(target: Target, folder: Path, thrown: dict[str, int]) -> bool:
    """Whether the target held."""

    def seen(_: object) -> None:
        thrown[target.name] += 1

    how = settings(
        max_examples=max(20, round(TURN * target.weight)),
        database=DirectoryBasedExampleDatabase(folder / "examples"),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    try:
        run(target, how, seen=seen)
    except Exception:
        return _kept(folder, target.name, traceback.format_exc())
    return True


def _kept(folder: Path, name: str, words: str) -> bool:
    file = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    file.write_text(words, errors="backslashreplace")
    print(f"{name} broke: {file}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
