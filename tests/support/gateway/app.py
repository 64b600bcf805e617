"""A whole gateway in this process, and far targets in miniature for it on real loopback connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import yaml

from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from gateway.config.targets import TargetConfig
from tests.support.gateway.small_target import SmallTarget
from tests.support.serving.hosts import ECHO, EchoHost
from tidegate import clock
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Manifest, Variant
from tidegate.types import LoadReport

MAX_BYTES = 2**22
LOOK_S = 0.01
TRIALS = 5  # on a machine that stands still a gateway may hedge too late, or take itself for overloaded: ask a new one
INFER = "/v2/models/echo/infer"
BODY = {"inputs": [{"name": "x", "datatype": "UINT8", "shape": [3], "data": [1, 2, 3]}]}
_ARTEFACT = {"artefact": "echo.onnx", "engine": "onnx", "where": ("edge", "pool"), "sha256": "0" * 64, "size_bytes": 1}
TWO_VARIANTS = msgspec.structs.replace(
    ECHO, variants=tuple(Variant(name=name, precision=name, **_ARTEFACT) for name in ("fp32", "int8"))
)


class TwoVariantHost(EchoHost):
    def manifest(self, name: str, version: str = "") -> Manifest:
        super().manifest(name, version)
        return TWO_VARIANTS


class Far(SmallTarget):
    """A target for a gateway: of `name`, whose tier comes first, with one variant of one model.

    Args:
        says_s: what it says that a call takes; it answers at once all the same.
    """

    def __init__(
        self, name: str, *, variant: str = "fp32", max_batch: int | None = None, says_s: float = 0.002
    ) -> None:
        costs = ((1.0, says_s), (100.0, 2 * says_s))
        offers = (ModelOffer("echo", "3", (VariantOffer(variant, variant, costs, max_batch),)),)
        super().__init__(name, TwoVariantHost(), offers, epoch=1, load=self._next_load, max_message_bytes=MAX_BYTES)
        self._sequence = 0

    def _next_load(self) -> LoadReport:
        self._sequence += 1
        return LoadReport(1, self._sequence, 0, 0, 0.0)


def repository(folder: Path) -> Path:
    home = folder / "models" / "echo" / "3"
    home.mkdir(parents=True)
    (home / "model.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(TWO_VARIANTS)))
    return folder / "models"


@asynccontextmanager
async def running(*fars: Far) -> AsyncIterator[None]:
    for far in fars:
        await far.start()
    try:
        yield
    finally:
        for far in fars:
            await far.kill()


def configured(folder: Path, *targets: TargetConfig, **more: object) -> GatewayConfig:
    return config_over(repository(folder), *targets, **more)


def config_over(models: Path, *targets: TargetConfig, **more: object) -> GatewayConfig:
    """Of a gateway that serves these models, on ports of its own."""
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
    more.setdefault("advertised_networks", ("127.0.0.0/8",))
    return GatewayConfig(model_repository=models, targets=targets, **ports, **more)  # type: ignore[arg-type]


def target(far: Far, **more: object) -> TargetConfig:
    tier, name = far.name.split("/")
    return TargetConfig(name=name, tier=tier, address=far.address, **more)  # type: ignore[arg-type]


async def until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    """Return once it is so. A machine that stands still takes nothing of the time for it."""
    left_s = within_s
    while not true():
        if left_s <= 0.0:
            raise TimeoutError(f"not within {within_s:g} s")
        slept_at = clock.now()
        await clock.sleep(LOOK_S)
        left_s -= min(clock.now() - slept_at, 5.0 * LOOK_S)


@asynccontextmanager
async def gateway_for(config: GatewayConfig) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    async with Gateway(config) as gateway, aiohttp.ClientSession() as session:
        await gateway.static_targets_tried(30.0)
        yield gateway, session


async def ask(gateway: Gateway, session: aiohttp.ClientSession, **headers: str) -> tuple[int, dict, dict[str, str]]:
    async with session.post(gateway.addresses["http"] + INFER, json=BODY, headers=headers) as response:
        return response.status, await response.json(), {name.lower(): text for name, text in response.headers.items()}
