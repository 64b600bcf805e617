"""The digits through a real gateway, edges and pool: what edges are not sure of comes from the pool, and is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.http.aio as triton_http_aio
from numpy.typing import NDArray

from tests.e2e.stack import Stack
from tidegate.arrays import array_to_tensor
from tidegate.engines.engine import load_engine
from tidegate.models.confidence import ConfidenceMeasure
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository
from tidegate.types import Datatype

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(400)]

BUDGET = {"tidegate-budget-ms": "20000"}  # quality is asked about here, not time


class Told(NamedTuple):
    """One image's answer: the class, the reason, and the rest of `tidegate-route` with who served it."""

    guess: int
    reason: str
    provisional: bool
    served_by: str


@pytest.fixture(scope="module")
def digits(models: Path) -> Manifest:
    return Repository(models).manifest("digits")


@pytest.fixture(scope="module")
def held_out() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    from tidegate.tools.build.demo.digits import held_out  # imports torch: slow, and only wanted here

    return held_out()


@pytest.fixture(scope="module")
def unsure(models: Path, digits: Manifest, held_out: Any) -> NDArray[np.bool_]:
    """Which images the edge's artefact, run alone in this process, is less sure of than the manifest demands."""
    (edge,) = digits.variants_for("edge")
    assert digits.confidence is not None
    engine = load_engine(edge.engine, Repository(models).artefact(digits, edge), outputs=("probabilities",))
    judge = ConfidenceMeasure(digits, digits.confidence)
    answers = [engine.infer({"image": image[None]})["probabilities"] for image in held_out[0]]
    sure = [judge.of(array_to_tensor("probabilities", answer, Datatype.FP32)) for answer in answers]
    return np.array(sure) < digits.confidence.threshold


async def recognised(stack: Stack, images: NDArray[np.float32]) -> list[Told]:
    async with triton_http_aio.InferenceServerClient(stack.http.removeprefix("http://")) as client:
        told = []
        for image in images:
            one = triton_http_aio.InferInput("image", [1, 1, 8, 8], "FP32")
            one.set_data_from_numpy(image[None])
            answer = await client.infer("digits", [one], headers=BUDGET)
            says = answer.get_response()["parameters"]
            reason, *words = says["tidegate-route"].split("; ")
            guess = int(answer.as_numpy("probabilities").argmax())
            told.append(Told(guess, reason, "provisional=1" in words, says["tidegate-served-by"]))
    return told


async def test_what_edges_are_not_sure_of_comes_from_the_pool_and_the_answers_are_as_good_as_its_own(
    stack: Stack, digits: Manifest, held_out: tuple[NDArray[np.float32], NDArray[np.int64]], unsure: NDArray[np.bool_]
) -> None:
    images, labels = held_out
    told = await recognised(stack, images)

    escalated = np.array([one.reason == "escalated" for one in told])
    asked_edge = np.array([one.reason == "escalated" or one.served_by.startswith("edge/") for one in told])
    assert asked_edge.mean() > 0.9, "the pool is asked first only where an edge was too busy to be sure in time"
    differs = (escalated != unsure) & asked_edge
    # Not all: the worker may round otherwise than this process, and on a busy machine the pool may look too slow.
    assert differs.mean() <= 0.02, [one for one, other in zip(told, differs, strict=True) if other]
    assert 0.03 < escalated.mean() < 0.25
    assert {one.served_by for one in told if one.reason == "escalated"} == {"pool/pool"}
    assert np.mean([one.provisional for one in told]) <= 0.02
    accuracy = float((np.array([one.guess for one in told]) == labels).mean())
    edge, pool = (one.quality for one in (*digits.variants_for("edge"), *digits.variants_for("pool")))
    assert edge is not None and pool is not None
    assert accuracy > edge.value
    assert accuracy >= pool.value - 0.005


async def test_without_the_pool_unsure_answers_are_given_and_declared(
    stack: Stack, held_out: tuple[NDArray[np.float32], NDArray[np.int64]], unsure: NDArray[np.bool_]
) -> None:
    images, _ = held_out
    few = [*np.flatnonzero(unsure)[:5], *np.flatnonzero(~unsure)[:5]]
    stack.kill("pool")
    told = await recognised(stack, images[few])
    assert {one.served_by.partition("/")[0] for one in told} == {"edge"}
    assert [one.provisional for one in told] == [True] * 5 + [False] * 5
