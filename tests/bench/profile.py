"""Where a serving process spends its CPU, part by part: a statistical profiler for a module that is run under it.

    python -m tests.bench.profile OUT MODULE [ARGUMENT …]

Every few milliseconds (the kernel's tick) of CPU time that the process uses, in any thread, the main thread's stack
is looked at. A tracing profiler would count each call twice over and make code of many small functions look worse
than it is; samples cost one part in a hundred. A sample is charged to the innermost frame that belongs to a known
part, so that what the standard library does for a codec counts as the codec's. Where the main thread waits while CPU
is used, gRPC's own threads use it.

Sampling begins when the process gets SIGUSR1, so that its start is not counted; OUT is JSON, written when it ends.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

INTERVAL_S: Final = 0.001

# The first that a path contains.
PARTS: Final = (
    ("/gateway/http/", "front: OIP codecs and servers"),
    ("/tidegate/oip/check", "front: check against the manifest"),
    ("/tidegate/oip/grpc", "hop: OIP messages"),
    ("/tidegate/oip/", "front: OIP codecs and servers"),
    ("/aiohttp/", "front: aiohttp"),
    ("/gateway/observe/", "metrics, records and logs"),
    ("/gateway/serving/", "serving: dispatcher and execution"),
    ("/gateway/core/", "core: request, placement, fleet"),
    ("/gateway/targets/directory", "core: request, placement, fleet"),
    ("/tidegate/estimate/", "core: request, placement, fleet"),
    ("/tidegate/models/", "core: request, placement, fleet"),
    ("/gateway/targets/", "hop: targets and link"),
    ("/tidegate/link/", "hop: targets and link"),
    ("/grpc/", "hop: grpc.aio"),
    ("/gateway/layers/", "layers and host"),
    ("/gateway/host", "layers and host"),
    ("/gateway/catalog", "layers and host"),
)
LOOP: Final = "event loop, and gRPC's threads while it waits"


class Sampler:
    """Counts where the main thread was, by part and by function."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    def start(self, _number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGPROF, self.sample)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)

    def sample(self, _number: int, frame: FrameType | None) -> None:
        part, at = LOOP, frame
        while at is not None:
            found = part_of(at.f_code.co_filename)
            if found is not None:
                part = found
                break
            at = at.f_back
        self.parts[part] += 1
        if at is not None:
            name = at.f_code.co_filename.rpartition("site-packages/")[2]
            self.functions[f"{'/'.join(name.split('/')[-3:])}:{at.f_code.co_qualname}"] += 1

    def write(self, out: Path) -> None:
        total = max(self.parts.total(), 1)
        found = {
            "samples": total,
            "parts": {part: count / total for part, count in self.parts.most_common()},
            "functions": {name: count / total for name, count in self.functions.most_common(60)},
        }
        out.write_text(json.dumps(found, indent=2))


def part_of(path: str) -> str | None:
    return next((part for piece, part in PARTS if piece in path), None)


def run(out: Path, module: str, arguments: list[str]) -> None:
    """Run a module as `python -m` would, and write what it was seen doing when it ends."""
    sys.argv = [module, *arguments]
    sampler = Sampler()
    signal.signal(signal.SIGUSR1, sampler.start)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sampler.stop()
        sampler.write(out)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
