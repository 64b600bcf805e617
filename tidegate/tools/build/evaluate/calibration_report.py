"""What a calibration found, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import msgspec

from tidegate.models.generative import BeginningMeasure, CommitWindow
from tidegate.tools.build.evaluate.calibrate import CalibrationResult
from tidegate.tools.build.evaluate.threshold import ThresholdOutlook

_MEASURED: Final[dict[BeginningMeasure, str]] = {"mean": "mean probability", "least": "least probability"}


def as_words(found: CalibrationResult) -> Iterator[str]:
    """A small table, line by line."""
    manifest, how = found.manifest, found.section
    if isinstance(how, CommitWindow):
        read = f"the {_MEASURED[how.measure]} of the first {how.tokens} tokens"
    else:
        read = f"{how.measure} of {f'softmax of {how.output}' if how.softmax else how.output}"
    yield f"{manifest.name}, version {manifest.version}: {read} at the edge ({found.edge.name})"
    yield f"threshold {how.threshold:g}; of the answers at most {how.max_share:.0%} are escalated in the long run"
    yield f"{'':12}{'samples':>9}{'escalated':>11}{'edge alone':>12}{'pool alone':>12}{'combined':>10}"
    yield _row("calibration", found.calibration)
    yield _row("held out", found.held_out)


def _row(name: str, seen: ThresholdOutlook) -> str:
    return f"{name:12}{seen.samples:9}{seen.escalated:11.1%}{seen.edge:12.2%}{seen.pool:12.2%}{seen.combined:10.2%}"


def as_values(found: CalibrationResult, *, written: bool) -> dict[str, Any]:
    """The same as plain values; shares and accuracies go from 0 to 1."""
    how = found.section
    return {
        "model": found.manifest.name,
        "version": found.manifest.version,
        "edge": found.edge.name,
        "pool": found.pool.name,
        "commit_window" if isinstance(how, CommitWindow) else "confidence": msgspec.to_builtins(how),
        "calibration": asdict(found.calibration),
        "held_out": asdict(found.held_out),
        "written": written,
    }
