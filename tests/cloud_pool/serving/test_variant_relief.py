"""A pool that is late lessens its precision for callers who come through a gateway too, says so, and goes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkEvent, LinkLoad, LinkUp
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Placer
from gateway.targets.link import LinkTarget
from tests.cloud_pool.models import TEXT, manifest_of
from tests.cloud_pool.test_app import eventually, pool, words
from tests.cloud_pool.workers_support import text_repository
from tidegate import clock
from tidegate.models.repository import Repository, save_manifest

pytestmark = pytest.mark.slow


@pytest.fixture
def two_precisions(tmp_path: Path) -> Path:
    """The text model twice: what is tried is who gets which, not what they compute."""
    root = text_repository(tmp_path / "models")
    (full,) = Repository(root).manifest(TEXT.name).variants
    lesser = msgspec.structs.replace(full, name="bf16", precision="bf16")
    save_manifest(root / TEXT.name / TEXT.version, manifest_of(variants=(full, lesser)))
    return root


async def test_a_late_pool_lessens_its_precision_at_the_gateway_too_and_goes_back(two_precisions: Path) -> None:
    fleet = Fleet(lambda model, version: "tokens")

    def fold(event: LinkEvent) -> None:
        if isinstance(event, LinkUp | LinkLoad):
            fleet.fold(event, clock.now())

    def placed(variant: str = "") -> str:
        now = clock.now()
        decision = Placer(fleet).decide(Ask("text", "1", 7.0, 1, 7, now + 30.0, variant), now)
        return decision.chosen.variant.name if decision.chosen is not None else ""

    keys = {
        "control": {"latency_target_s": 1e-6, "patience_s": 0.2, "dwell_s": 0.05, "degrade_to": "bf16"},
        "recycling": {"enabled": False, "check_s": 0.05},
    }
    fleet.add(TargetSpec("pool/pool", "pool", "simulated"), clock.now())
    with capture_logs():
        async with pool(two_precisions, "text", **keys) as app:
            target = LinkTarget("pool/pool", app.address, gateway_name="test", on_event=fold, draw=lambda: 0.1)
            async with target:
                await eventually(lambda: target.connected)
                assert placed() == "fp32"

                async def load() -> None:
                    while True:
                        variant = placed()
                        reply = await target.infer(
                            words(7), variant=variant, budget_s=30.0, priority=0, traceparent="", on_accepted=_ignore
                        )
                        assert reply.variant == variant

                callers = [asyncio.create_task(load()) for _ in range(4)]
                await eventually(lambda: placed() == "bf16")
                assert placed("fp32") == "fp32"
                for caller in callers:
                    caller.cancel()
                await asyncio.gather(*callers, return_exceptions=True)
                await eventually(lambda: placed() == "fp32")


def _ignore(_: object) -> None:
    pass
