"""`tidegate model calibrate` of a generating model: how sure the beginning of an edge's answer must be.

The edge's variant and the pool's answer every task greedily, each in a worker process as in service. An answer is right
if it has the known one in it; the confidence is that of the edge's first tokens. One half of the tasks chooses the
threshold, the other only shows what it does, as for classifiers (`calibrate.py`).

What is written is the section `generative.commit_window`, and the variants' qualities where none was measured.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from tidegate.generate.beginning_confidence import beginning_confidence
from tidegate.generate.text.text_models import TextModel
from tidegate.models.generative import MAX_COMMIT_TOKENS, BeginningMeasure, CommitWindow
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import Repository, save_manifest
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.calibrate import (
    LEAST_SAMPLES,
    MOST_SAMPLES,
    CalibrationResult,
    halves,
    max_share,
    name_of,
    variants_of,
    with_qualities,
)
from tidegate.tools.build.evaluate.greedy import ScoredAnswer, variant_worker
from tidegate.tools.build.evaluate.prompts import encoded_prompt, text_side
from tidegate.tools.build.evaluate.threshold import CalibrationGoal, GradedSamples, threshold_for, threshold_outlook
from tidegate.tools.build.progress import Progress, no_progress
from tidegate.tools.build.staging import model_lock

Match = Literal["contains", "starts", "equals"]
MATCHES: Final[tuple[Match, ...]] = ("contains", "starts", "equals")
_MAX_BYTES: Final = 1 << 24
_AT_A_TIME: Final = 64  # tasks under way: a worker takes as many as it has slots, and the others wait


class KnownTask(NamedTuple):
    """A prompt, and the texts of which one makes an answer right."""

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """What to judge an answer by, and when it is right. None: as the manifest says, else 8 tokens and their mean."""

    tokens: int | None = None
    measure: BeginningMeasure | None = None
    match: Match = "contains"
    max_tokens: int = 64


def calibrate_beginnings(
    repository: Repository,
    name: str,
    goal: CalibrationGoal,
    tasks: Path,
    *,
    version: str = "",
    wishes: WindowOptions = WindowOptions(),
    write: bool = True,
    progress: Progress = no_progress,
) -> CalibrationResult:
    """Choose the threshold of a generating model in the repository, and write it into its manifest.

    Raises:
        BuildError: the tasks cannot be read or do not fit, a variant does not run, or no threshold reaches the goal.
        ModelNotFound, RepositoryError: the model is not there, or its artefacts are not what its manifest says.
    """
    manifest = repository.manifest(name, version)
    if manifest.generative is None:
        raise BuildError(f"{name_of(manifest)} generates nothing: --tasks is for models that do; give --data")
    edge, pool = variants_of(manifest)
    for variant in (edge, pool):
        repository.verify(manifest, variant)
    known = read_tasks(tasks)
    folder, window = repository.folder(manifest), _window(manifest, wishes)
    graded = asyncio.run(_graded(folder, manifest, (edge, pool), known, window, wishes, progress))
    first, second = (_part(graded, half) for half in halves(len(known)))
    threshold = threshold_for(goal, first)
    chosen, checked = threshold_outlook(first, threshold), threshold_outlook(second, threshold)
    window = msgspec.structs.replace(window, threshold=threshold, max_share=max_share(chosen))
    measured = with_qualities(manifest, {edge.name: checked.edge, pool.name: checked.pool}, checked.samples)
    generative = msgspec.structs.replace(manifest.generative, commit_window=window)
    found = CalibrationResult(msgspec.structs.replace(measured, generative=generative), edge, pool, chosen, checked)
    if edge.name not in found.manifest.improvable:
        raise BuildError(
            f"{name_of(manifest)}: {pool.name!r} is no better than {edge.name!r} in measured quality, so no answer of "
            "the edge's would be escalated"
        )
    if write:
        with model_lock(repository.root, name):
            save_manifest(folder, found.manifest)
    return found


def read_tasks(path: Path) -> tuple[KnownTask, ...]:
    """The tasks of a file: a JSON object a line, with `prompt` and `answer`, a text or a list. Raises BuildError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        lines = content.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: cannot be read as lines of JSON: {error}") from error
    if len(content) > _MAX_BYTES:
        raise BuildError(f"{path}: is larger than {_MAX_BYTES >> 20} MiB")
    tasks = tuple(_task(f"{path}, line {at}", line) for at, line in enumerate(lines, 1) if line.strip())
    if not LEAST_SAMPLES <= len(tasks) <= MOST_SAMPLES:
        raise BuildError(f"{path}: has {len(tasks)} tasks; {LEAST_SAMPLES} to {MOST_SAMPLES} are wanted, one a line")
    return tasks


def is_right(text: str, answers: Sequence[str], match: Match) -> bool:
    """Whether an answer's text is one of the known ones, or has it; upper and lower case are the same."""
    said = text.strip().casefold()
    for answer in answers:
        known = answer.strip().casefold()
        if match == "equals":
            is_it = said == known
        elif match == "starts":
            is_it = said.startswith(known)
        else:
            is_it = re.search(rf"(?<!\w){re.escape(known)}(?!\w)", said) is not None
        if is_it:
            return True
    return False


def _task(where: str, line: str) -> KnownTask:
    try:
        said: Any = json.loads(line)
    except ValueError as error:
        raise BuildError(f"{where}: is no JSON: {error}") from error
    prompt, answer = (said.get("prompt"), said.get("answer")) if isinstance(said, dict) else (None, None)
    answers = answer if isinstance(answer, list) else [answer]
    texts = tuple(one for one in answers if isinstance(one, str) and one.strip())
    if not isinstance(prompt, str) or not prompt.strip() or not texts or len(texts) != len(answers):
        raise BuildError(f'{where}: must be {{"prompt": "a text", "answer": "a text"}}, or a list of texts as answer')
    return KnownTask(prompt, texts)


def _window(manifest: Manifest, wishes: WindowOptions) -> CommitWindow:
    """The section with a threshold yet to be found."""
    assert manifest.generative is not None
    known = manifest.generative.commit_window or CommitWindow(1.0)
    tokens = known.tokens if wishes.tokens is None else wishes.tokens
    if not 1 <= tokens <= MAX_COMMIT_TOKENS:
        raise BuildError(f"--tokens {tokens}: must be from 1 to {MAX_COMMIT_TOKENS}")
    return CommitWindow(1.0, tokens, wishes.measure or known.measure)


async def _graded(
    folder: Path,
    manifest: Manifest,
    variants: tuple[Variant, Variant],
    tasks: Sequence[KnownTask],
    window: CommitWindow,
    wishes: WindowOptions,
    progress: Progress,
) -> GradedSamples:
    assert manifest.generative is not None
    room = manifest.generative.context - wishes.max_tokens
    async with text_side(folder, manifest) as side:
        prompts = [await encoded_prompt(side, task.prompt, room=room) for task in tasks]
        if () in prompts:
            raise BuildError(
                f"task {prompts.index(()) + 1} of {len(tasks)}: its prompt leaves no room for {wishes.max_tokens} "
                f"tokens in a context of {manifest.generative.context}; make --max-tokens less, or leave the task out"
            )
        found: list[list[ScoredAnswer]] = []
        for at, variant in enumerate(variants):
            progress(f"answering {len(tasks)} tasks with {variant.name}", at / len(variants))
            async with variant_worker(folder, manifest, variant) as worker:
                answers: list[ScoredAnswer] = []
                for start in range(0, len(prompts), _AT_A_TIME):
                    some = prompts[start : start + _AT_A_TIME]
                    answers += await asyncio.gather(*[worker.scored(one, wishes.max_tokens) for one in some])
                    progress(f"answering with {variant.name}", (at + len(answers) / len(prompts)) / len(variants))
                found.append(answers)
        right = [
            [
                is_right(_text(side, prompt, one), task.answers, wishes.match)
                for prompt, one, task in zip(prompts, answers, tasks, strict=True)
            ]
            for answers in found
        ]
    return GradedSamples(
        np.array([beginning_confidence(one.logprobs[: window.tokens], window.measure) for one in found[0]]),
        np.array(right[0]),
        np.array(right[1]),
    )


def _text(side: TextModel, prompt: Sequence[int], answer: ScoredAnswer) -> str:
    detokenizer = side.detokenizer(prompt)
    return "".join([detokenizer.push(id) for id in answer.ids]) + detokenizer.flush()


def _part(graded: GradedSamples, rows: Any) -> GradedSamples:
    return GradedSamples(graded.confidence[rows], graded.edge_right[rows], graded.pool_right[rows])
