from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from tests.bench import gpu
from tests.bench.gateway_overhead import Timing
from tests.bench.harness import Goal, Report, parser

SECTIONS: Final = {"encoders": "gpu_encoders", "served": "gpu_served", "generating": "gpu_generating"}


def main() -> None:
    options = parser(gpu.__doc__ or "")
    options.add_argument(
        "--only", choices=list(SECTIONS), action="append", help="leave the others out; may be repeated"
    )
    options.add_argument("--repository", type=Path, help="one that holds smollm2; without it nothing is generated")
    chosen = options.parse_args()
    quick = chosen.quick
    repeats, seconds = chosen.repeats or (2 if quick else 5), chosen.seconds or (2.0 if quick else 4.0)
    config = {"repeats": repeats, "seconds": seconds}
    import torch

    if not torch.cuda.is_available():
        for section in chosen.only or SECTIONS:
            print(Goal(SECTIONS[section], None, 1.0, why="there is no CUDA device"))
        return
    config |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for section in chosen.only or SECTIONS:
        report = Report(SECTIONS[section], dict(config))
        with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch:
            if section == "encoders":
                _encoders(report, Path(scratch), repeats)
            elif section == "served":
                _served(report, Path(scratch), repeats, seconds)
            else:
                _generating(report, chosen.repository, repeats, seconds, 16 if quick else 64)
        report.write()


def _encoders(report: Report, scratch: Path, repeats: int) -> None:
    from tests.bench.gpu import encoders
    from tests.bench.gpu.networks import LARGE, MINILM, write_network

    for size in (MINILM, LARGE):
        encoders.measure(report, write_network(size, scratch), repeats)


def _served(report: Report, scratch: Path, repeats: int, seconds: float) -> None:
    from tests.bench.gpu import served
    from tests.bench.gpu.networks import MINILM, write_network

    served.run(report, write_network(MINILM, scratch), seconds, repeats)


def _generating(report: Report, repository: Path | None, repeats: int, seconds: float, texts: int) -> None:
    if repository is None:
        report.goal(Goal("generating", None, 1.0, why="--repository names none that holds smollm2"))
        return
    from tests.bench.gpu import generating

    generating.measure(report, repository, Timing(repeats, seconds, 2.0), texts)


if __name__ == "__main__":
    main()
