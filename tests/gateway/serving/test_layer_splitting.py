"""Requests cut between layers, through a real gateway, edge agent and pool with real halves of a real model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from gateway.config.targets import TargetConfig
from tests.support.gateway.app import config_over, until
from tests.support.models.residual_cnn import ENDS, NAME, residual_repository
from tidegate.config import load
from tidegate.engines.engine import load_engine
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Where
from tidegate.models.repository import Repository
from tidegate.tools.build.evaluate.measure import cosines
from tidegate.tools.build.split.layer_splitter import SplitOptions, split_layers

pytestmark = pytest.mark.slow
BUDGET = {"tidegate-budget-ms": "60000"}


@dataclass
class CutStack:
    """The gateway with its edge and its pool, and an image with the whole's own answer to it."""

    gateway: Gateway
    session: aiohttp.ClientSession
    pool_life: AsyncExitStack
    body: dict[str, Any]
    wanted: Any

    async def ask(self, **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        url = f"{self.gateway.addresses['http']}/v2/models/{NAME}/infer"
        async with self.session.post(url, json=self.body, headers={**BUDGET, **headers}) as answer:
            return answer.status, await answer.json(), {name.lower(): text for name, text in answer.headers.items()}

    async def explained(self) -> list[dict[str, Any]]:
        async with self.session.get(f"{self.gateway.addresses['admin']}/debug/decisions") as answer:
            found = await answer.json()
        return list(found["decisions"])


@asynccontextmanager
async def cut_stack(folder: Path, *, where: tuple[Where, ...], masked: bool = False) -> AsyncIterator[CutStack]:
    """Args: where: the whole may be computed; its halves are there in any case."""
    models = residual_repository(folder / "models", where=where, masked=masked)
    split_layers(Repository(models), NAME, SplitOptions(layers=(ENDS[1],)), lambda _what, _ratio: None)
    usual = {"grpc_port": 0, "model_repository": models, "warmup_budget_s": 0.5}
    async with AsyncExitStack() as stack:
        life = await stack.enter_async_context(AsyncExitStack())
        pool = await life.enter_async_context(PoolApp(load(PoolConfig, name="main", threads=1, **usual)))
        edge = await stack.enter_async_context(
            EdgeApp(load(EdgeConfig, name="a", http_port=None, state_dir=folder / "a", **usual), draw=lambda: 0.1)
        )
        targets = (
            TargetConfig(name="main", address=pool.address),
            TargetConfig(name="a", tier="edge", address=edge.addresses["grpc"]),
        )
        gateway = await stack.enter_async_context(Gateway(config_over(models, *targets)))
        await gateway.static_targets_tried(30.0)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        manifest = Repository(models).manifest(NAME)
        feed = example_arrays(manifest, {"batch": 2}, seed=5)
        whole = load_engine("onnx", Repository(models).artefact(manifest, manifest.variants[0]), outputs=())
        body = {
            "id": "mine",
            "inputs": [
                {"name": name, "datatype": "FP32", "shape": list(array.shape), "data": array.ravel().tolist()}
                for name, array in feed.items()
            ],
        }
        yield CutStack(gateway, session, life, body, whole.infer(feed)["scores"])


def _scores(answer: dict[str, Any]) -> Any:
    (output,) = answer["outputs"]
    return np.array(output["data"], dtype=np.float32).reshape(output["shape"])


async def test_an_input_that_is_pinned_to_edges_is_answered_through_a_cut_as_the_whole_would_answer_it(
    tmp_path: Path,
) -> None:
    async with cut_stack(tmp_path, where=("pool",), masked=True) as stack:
        await until(lambda: stack.gateway.host.model_ready(f"{NAME}.head-1"))
        await until(lambda: stack.gateway.host.model_ready(f"{NAME}.tail-1"))
        # Only a pool has the whole, so that an input that must not leave edges can be answered by a cut alone.
        status, answer, headers = await stack.ask(**{"tidegate-pin": "edge-input"})
        assert status == 200, answer
        assert (answer["model_name"], answer["model_version"], answer["id"]) == (NAME, "1", "mine")
        assert cosines(stack.wanted, _scores(answer)).min() >= 0.99
        assert headers["tidegate-served-by"] == "pool/main"
        assert headers["tidegate-route"].startswith("split; variant=fp32; attempts=2; ")
        assert headers["tidegate-split"] == f"head=edge/a variant=fp32 layer={ENDS[1]}"
        assert answer["parameters"]["tidegate-split"] == headers["tidegate-split"]

        # Neither half is a model that callers see, and both are explained under the caller's own id.
        async with stack.session.post(f"{stack.gateway.addresses['http']}/v2/repository/index", json={}) as listed:
            assert {one["name"] for one in await listed.json()} == {NAME}
        halves = {one["split"]["role"]: one for one in await stack.explained() if one["id"] == "mine"}
        assert halves.keys() == {"head", "tail"}
        assert halves["head"]["end"]["served_by"] == "edge/a"
        assert "no target takes the whole" in halves["head"]["split"]["why"]
        assert halves["tail"]["split"]["why"] == "its head was computed by edge/a"
        async with stack.session.get(f"{stack.gateway.addresses['metrics']}/metrics") as scraped:
            assert f'tidegate_split_requests_total{{model="{NAME}",result="answered"}} 1.0' in await scraped.text()

        # Stricter pins leave nothing to cut: the refusal says that the pool is outside.
        for pin in ("edge", "site"):
            status, answer, _ = await stack.ask(**{"tidegate-pin": pin})
            assert status == 503
            assert "pool/main is outside of the pin" in answer["error"]


async def test_where_both_can_compute_the_whole_on_a_good_link_nothing_is_cut(tmp_path: Path) -> None:
    async with cut_stack(tmp_path, where=("edge", "pool")) as stack:
        status, answer, headers = await stack.ask()
        assert status == 200
        assert "tidegate-split" not in headers
        (one,) = [one for one in await stack.explained() if one["id"] == "mine"]
        assert one["split"]["role"] == "whole"
        np.testing.assert_allclose(_scores(answer), stack.wanted, rtol=1e-4, atol=1e-4)


async def test_the_edge_finishes_with_its_full_model_when_the_pool_has_gone_between_the_halves(tmp_path: Path) -> None:
    async with cut_stack(tmp_path, where=("edge",)) as stack:
        # Nothing of the edge's own would be cut on a link this good: the choice is made for it.
        from gateway.serving import layer_splitting

        decided = layer_splitting.choose_split
        with pytest.MonkeyPatch.context() as patched:

            def always(placer: Any, ask: Any, cuts: Any, now: float) -> Any:
                decision = decided(placer, ask, cuts, now)
                return decision._replace(chosen=decision.best)

            patched.setattr(layer_splitting, "choose_split", always)
            _, _, headers = await stack.ask()
            assert headers["tidegate-served-by"] == "pool/main"
            taken = asyncio.create_task(stack.ask())
            await stack.pool_life.aclose()
            status, answer, _ = await taken  # whichever side of the end it was on
            assert status == 200
            status, answer, headers = await stack.ask()
            assert status == 200
            assert headers["tidegate-served-by"] == "edge/a"
            np.testing.assert_allclose(_scores(answer), stack.wanted, rtol=1e-4, atol=1e-4)
        assert json.dumps(answer)  # what came is plain
