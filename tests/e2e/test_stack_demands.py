"""A pin and a quality floor with real processes: what is pinned is never sent to the pool, and its refusal says why."""

from __future__ import annotations

import urllib.request

import openai
import pytest

from tests.e2e.stack import Stack
from tests.e2e.test_stack_serving import LONG, SHORT, embed

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def answered_by_the_pool(stack: Stack) -> float:
    """How many answers the pool has given, by the gateway's metrics."""
    with urllib.request.urlopen(f"{stack.ready['metrics']}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("tidegate_requests_total{") and 'tier="pool"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def test_a_request_pinned_to_the_edge_stays_there(stack: Stack) -> None:
    before = answered_by_the_pool(stack)
    status, headers, _ = embed(stack, SHORT, **{"tidegate-pin": "edge"})
    assert status == 200
    assert headers["tidegate-served-by"].startswith("edge/edge-")
    assert headers["tidegate-route"].startswith("pinned; variant=int8;")

    status, _, body = embed(stack, LONG, **{"tidegate-pin": "edge"})  # more than an edge takes
    assert status == 503
    assert "pinned to edge" in body["error"]["message"]
    assert "pool/pool is outside of the pin, in zone cloud" in body["error"]["message"]
    assert "edge/edge-1 takes rows of at most" in body["error"]["message"]
    assert answered_by_the_pool(stack) == before


def test_a_quality_floor_is_kept_by_the_pool_while_the_edges_are_below_it(stack: Stack) -> None:
    _, headers, _ = embed(stack, SHORT, **{"tidegate-min-quality": "0.5"})
    assert headers["tidegate-served-by"].startswith("edge/")
    _, headers, _ = embed(stack, SHORT, **{"tidegate-min-quality": "0.9999"})
    assert headers["tidegate-served-by"] == "pool/pool"

    status, _, body = embed(stack, SHORT, **{"tidegate-min-quality": "0.9999", "tidegate-pin": "edge"})
    assert status == 503
    assert "has int8 of quality 0.99" in body["error"]["message"]


@pytest.mark.clients
def test_the_openai_sdk_demands_by_extra_headers(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.http}/v1", api_key="any", max_retries=0) as client:
        for _ in range(5):
            answer = client.embeddings.with_raw_response.create(
                model="minilm", input=SHORT, extra_headers={"tidegate-pin": "edge"}
            )
            assert answer.headers["tidegate-served-by"].startswith("edge/")
            if "hedged=0" in answer.headers["tidegate-route"]:
                break  # where the machine is busy, a second edge is asked as well, and may be the first to answer
        assert answer.headers["tidegate-route"].startswith("pinned;")
        with pytest.raises(openai.BadRequestError, match="one of edge, edge-input, site, any"):
            client.embeddings.create(model="minilm", input=SHORT, extra_headers={"tidegate-pin": "home"})
