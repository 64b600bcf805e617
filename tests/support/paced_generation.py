"""Artefacts of the paced generative engine for tests, and what loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from tidegate.engines.generation.limits import GenerationLimits
from tidegate.engines.generation.paced_generation import PacedGeneration
from tidegate.generate.request import GenerateRequest
from tidegate.workers.process import EngineSpec

QUICK = PacedGeneration(prefill_ms=0.01, step_ms=((1.0, 0.5),), slots=4)
KEY = "paced"


def write_pace(folder: Path, pace: PacedGeneration = QUICK, **changes: Any) -> Path:
    """The artefact's file."""
    path = folder / "generation.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(msgspec.structs.replace(pace, **changes))))
    return path


def generative(artefact: Path, *, key: str = KEY, paced_slow: float = 1.0, slots: int = 0) -> EngineSpec:
    return EngineSpec(key, "paced", artefact, (), paced_slow=paced_slow, generation=GenerationLimits(slots=slots))


def asking(max_tokens: int, *prompt: int, **words: Any) -> GenerateRequest:
    return GenerateRequest(prompt or (1, 2, 3), max_tokens, **words)
