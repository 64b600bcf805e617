"""A pin and a quality floor from the outside: over HTTP and gRPC, by header and by parameter, and from a manifest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import pytest
import yaml

from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from gateway.config.targets import TargetConfig
from tests.support.gateway.app import BODY, INFER, TWO_VARIANTS, Far, ask, gateway_for, running, target
from tests.support.serving.hosts import echo_request
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.oip.grpc.codec import message_from_request
from tidegate.outcome import Overloaded
from tidegate.rpc import oip_pb2

pytestmark = pytest.mark.slow


def far(name: str, variant: str, quality: float) -> Far:
    one = Far(name, variant=variant)
    offered = VariantOffer(variant, variant, ((1.0, 0.002), (100.0, 0.004)), quality=quality)
    one.offers = (ModelOffer("echo", "3", (offered,)),)
    return one


def configured(folder: Path, *targets: TargetConfig, **manifest: Any) -> GatewayConfig:
    home = folder / "models" / "echo" / "3"
    home.mkdir(parents=True)
    (home / "model.yaml").write_text(
        yaml.safe_dump(msgspec.to_builtins(msgspec.structs.replace(TWO_VARIANTS, **manifest)))
    )
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
    return GatewayConfig(model_repository=folder / "models", targets=targets, **ports)  # type: ignore[arg-type]


@asynccontextmanager
async def fleet(folder: Path, **manifest: Any) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession, dict[str, Far]]]:
    """An int8 edge, an fp32 pool on the premises, and an fp32 pool in the cloud."""
    fars = {
        "edge": far("edge/attic", "int8", 0.97),
        "site": far("pool/cellar", "fp32", 1.0),
        "cloud": far("pool/main", "fp32", 1.0),
    }
    async with running(*fars.values()):
        targets = target(fars["edge"]), target(fars["site"], zone="site"), target(fars["cloud"])
        async with gateway_for(configured(folder, *targets, **manifest)) as (gateway, session):
            yield gateway, session, fars


async def test_a_pinned_request_is_answered_inside_or_not_at_all(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, session, fars):
        status, _, headers = await ask(gateway, session, **{"tidegate-pin": "edge"})
        assert (status, headers["tidegate-served-by"]) == (200, "edge/attic")
        assert headers["tidegate-route"].startswith("pinned; variant=")

        fars["edge"].host.error = Overloaded("full", retry_after_s=0.1)
        assert (await ask(gateway, session, **{"tidegate-pin": "edge"}))[0] == 429
        status, _, headers = await ask(gateway, session, **{"tidegate-pin": "site"})
        assert (status, headers["tidegate-served-by"]) == (200, "pool/cellar")
        assert fars["cloud"].host.calls == []

        fars["site"].host.error = fars["edge"].host.error
        assert (await ask(gateway, session, **{"tidegate-pin": "site"}))[0] == 429
        assert fars["cloud"].host.calls == []


async def test_a_pin_that_no_target_can_keep_is_503_with_each_targets_reason(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, session, fars):
        await fars["edge"].kill()
        await fars["site"].kill()
        for _ in range(2):  # the first may meet the broken links themselves
            status, body, _ = await ask(gateway, session, **{"tidegate-pin": "site"})
        assert status == 503
        assert "pinned to site" in body["error"]
        assert "pool/main is outside of the pin, in zone cloud" in body["error"]
        assert fars["cloud"].host.calls == []


@pytest.mark.parametrize(("name", "value", "allowed"), [
    ("tidegate-pin", "cloud", "one of edge, edge-input, site, any"),
    ("tidegate-min-quality", "98", "a number from 0 to 1"),
])  # fmt: skip
async def test_a_demand_that_is_none_is_400_with_its_value_and_what_is_allowed(
    tmp_path: Path, name: str, value: str, allowed: str
) -> None:
    async with fleet(tmp_path) as (gateway, session, _):
        status, body, _ = await ask(gateway, session, **{name: value})
        assert status == 400
        assert allowed in body["error"] and repr(value) in body["error"]

        async with session.post(
            gateway.addresses["http"] + INFER, json=BODY | {"parameters": {name: value}}
        ) as response:
            assert response.status == 400
            assert allowed in (await response.json())["error"]

        async with grpc.aio.insecure_channel(gateway.addresses["grpc"]) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.aio.AioRpcError, match=allowed) as caught:
                await infer(message_from_request(echo_request()).SerializeToString(), metadata=((name, value),))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_demands_mean_the_same_over_http_parameters_and_grpc(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, session, _):
        parameters = {"tidegate-pin": "site", "tidegate-min-quality": 0.99}
        async with session.post(gateway.addresses["http"] + INFER, json=BODY | {"parameters": parameters}) as response:
            assert response.headers["tidegate-served-by"] == "pool/cellar"

        async with grpc.aio.insecure_channel(gateway.addresses["grpc"]) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            by_metadata = infer(
                message_from_request(echo_request()).SerializeToString(),
                metadata=(("tidegate-pin", "site"), ("tidegate-min-quality", "0.99")),
            )
            await by_metadata
            assert dict(await by_metadata.trailing_metadata())["tidegate-served-by"] == "pool/cellar"

            message = message_from_request(echo_request())
            message.parameters["tidegate-pin"].string_param = "site"
            message.parameters["tidegate-min-quality"].double_param = 0.99
            answer = oip_pb2.ModelInferResponse.FromString(await infer(message.SerializeToString()))
            assert answer.parameters["tidegate-served-by"].string_param == "pool/cellar"


async def test_a_fallback_below_the_floor_never_happens(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, session, fars):
        for name in ("site", "cloud"):
            fars[name].host.error = Overloaded("full", retry_after_s=0.1)

        assert (await ask(gateway, session))[2]["tidegate-served-by"] == "edge/attic"
        assert (await ask(gateway, session, **{"tidegate-min-quality": "0.98"}))[0] == 429

        assert len(fars["edge"].host.calls) == 1


async def test_a_manifest_demands_as_a_caller_does_and_the_stricter_wins(tmp_path: Path) -> None:
    async with fleet(tmp_path, pin="site", min_quality=0.98) as (gateway, session, fars):
        for headers in ({}, {"tidegate-pin": "any", "tidegate-min-quality": "0.5"}):
            status, _, said = await ask(gateway, session, **headers)
            assert (status, said["tidegate-served-by"]) == (200, "pool/cellar")
            assert said["tidegate-route"].startswith("pinned;")
        status, body, _ = await ask(gateway, session, **{"tidegate-pin": "edge"})
        assert status == 503
        assert "of quality 0.98 pinned to edge" in body["error"]
        assert fars["edge"].host.calls == fars["cloud"].host.calls == []
