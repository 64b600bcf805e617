"""A gateway whose only target is a server of another maker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from gateway.config.targets import TargetConfig
from tests.support.gateway.text_gateway import text_repository
from tidegate import clock

THERE = "there/talker"


def talker_repository(folder: Path) -> Path:
    """A repository with `talker`, whose tokenizer is `tiny_tokenizer`'s."""
    return text_repository(folder)


@asynccontextmanager
async def upstream_gateway(
    url: str,
    repository: Path | None = None,
    *,
    within_s: float = 10.0,
    others: tuple[TargetConfig, ...] = (),
    **section: Any,
) -> AsyncIterator[Gateway]:
    """Args: repository: None: it knows nothing of the model. section: of the target's `openai`."""
    given = {"models": {"talker": THERE}, "probe_interval_s": 0.2, **section}
    target = TargetConfig(name="up", transport="openai", address=url, openai=given)  # type: ignore[call-arg, arg-type]
    config = GatewayConfig(  # type: ignore[call-arg]
        model_repository=repository, targets=(target, *others), http_port=0, grpc_port=0, metrics_port=0, admin_port=0
    )
    async with Gateway(config) as gateway:
        await gateway.static_targets_tried(within_s)
        yield gateway


async def until_up(gateway: Gateway, *, up: bool = True) -> None:
    while gateway.fleet.targets["pool/up"].up is not up:
        await clock.sleep(0.01)
