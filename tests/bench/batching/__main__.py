"""Run it: `python -m tests.bench.batching [--quick] [--repeats 3] [--seconds 5] [--minutes 17] [--no-peers]`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from tests.bench.batching import __doc__ as words
from tests.bench.batching.bench import Bench, Plan
from tests.bench.batching.goals import conclude
from tests.bench.batching.servers import stay_on
from tests.bench.harness import Report, cores, parser


async def main() -> None:
    options = parser(words or "")
    options.add_argument("--minutes", type=float, default=17.0, help="no repeat begins after so many")
    options.add_argument("--no-peers", action="store_true", help="only ours and what is in process")
    arguments = options.parse_args()
    plan = Plan(
        repeats=arguments.repeats or (1 if arguments.quick else 3),
        seconds=arguments.seconds or (1.5 if arguments.quick else 5.0),
        minutes=arguments.minutes,
        quick=arguments.quick,
        peers=not arguments.no_peers,
    )
    measured, rest = cores()
    stay_on(rest)
    report = Report("batching", {"plan": vars(plan), "core": measured})
    with tempfile.TemporaryDirectory(prefix="batching-") as scratch:
        try:
            async with AsyncExitStack() as stack:
                bench = Bench(plan, report, Path(scratch), measured, stack)
                await bench.start()
                await bench.measure()
            await bench.growth()
        except BaseException:
            _show_logs(Path(scratch))
            raise
    conclude(bench, report)
    report.write()


def _show_logs(scratch: Path) -> None:
    """The ends of everybody's logs, before they go: whoever failed says why in one of them."""
    for path in sorted(scratch.glob("*.log")):
        if words := path.read_text(errors="replace")[-2000:].strip():
            print(f"== {path.name}\n{words}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
