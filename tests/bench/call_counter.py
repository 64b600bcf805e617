"""How many Python functions a serving process calls: a module that is run under a count, for `calls`.

    python -m tests.bench.call_counter OUT MODULE [ARGUMENT …]

SIGUSR1 begins a window, SIGUSR2 ends it and adds a line of JSON to OUT: the calls of all Python functions in the main
thread, those of each, and `garbage`, the objects that only a garbage collection frees. A coroutine counts anew each
time it goes on. C functions do not count.
"""

from __future__ import annotations

import cProfile
import gc
import json
import runpy
import signal
import sys
from pathlib import Path
from types import CodeType, FrameType


class CallCounter:
    def __init__(self, out: Path) -> None:
        self._out = out
        self._profile = cProfile.Profile(builtins=False)

    def begin(self, _number: int, _frame: FrameType | None) -> None:
        gc.collect()
        gc.disable()
        self._profile = cProfile.Profile(builtins=False)
        self._profile.enable()

    def end(self, _number: int, _frame: FrameType | None) -> None:
        self._profile.disable()
        garbage = gc.collect()
        gc.enable()
        functions = {
            _name(one.code): one.callcount for one in self._profile.getstats() if isinstance(one.code, CodeType)
        }
        with self._out.open("a") as out:
            out.write(json.dumps({"calls": sum(functions.values()), "functions": functions, "garbage": garbage}) + "\n")


def _name(code: CodeType) -> str:
    return f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_firstlineno} {code.co_qualname}"


def run(out: Path, module: str, arguments: list[str]) -> None:
    """Run a module as `python -m` would, and count when told to."""
    sys.argv = [module, *arguments]
    counter = CallCounter(out)
    signal.signal(signal.SIGUSR1, counter.begin)
    signal.signal(signal.SIGUSR2, counter.end)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
