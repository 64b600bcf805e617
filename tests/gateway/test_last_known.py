"""Last-known answers through a whole gateway: what is given where nothing else answers, and to whom it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.commands.explain import explain
from gateway.config.agreement import AgreementConfig
from gateway.core.agreement.agreement_watch import AgreementTurn, AnswerSource
from tests.gateway.test_known_answers import VersionedFar, _up, change, gateway_over, printed_by, write
from tests.support.gateway.app import INFER, TWO_VARIANTS, ask, until
from tidegate import clock
from tidegate.client.answers import call_record
from tidegate.outcome import Overloaded

pytestmark = pytest.mark.slow
OLD: dict[str, Any] = {"ttl_s": 0.05, "stale_for_s": 600}


async def other_input(gateway: Gateway, session: aiohttp.ClientSession, value: int, **headers: str) -> Any:
    body = {"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1], "data": [value]}]}
    async with session.post(gateway.addresses["http"] + INFER, json=body, headers=headers) as response:
        return response.status, await response.json(), dict(response.headers)


async def lost(gateway: Gateway, far: VersionedFar) -> None:
    await far.kill()
    await until(lambda: not _up(gateway, far.name))


async def test_where_no_target_is_left_the_last_known_answer_is_given_and_says_so_everywhere(tmp_path: Path) -> None:
    far = VersionedFar("pool/main")
    async with gateway_over(tmp_path, far, cache=OLD) as (gateway, session):
        _, first, _ = await ask(gateway, session)
        await clock.sleep(0.1)
        assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/main"  # it is old, and there is a target
        await lost(gateway, far)

        code, answer, said = await ask(gateway, session)

        assert (code, said["tidegate-served-by"]) == (200, "cache"), answer
        assert answer["outputs"] == first["outputs"]
        route = "last-known; variant=fp32; attempts=0; hedged=0; fallback=0; degraded=1; provisional=0"
        assert said["tidegate-route"] == route
        age = said["tidegate-last-known"]
        assert age.startswith("age-s=") and age.endswith("; of=input")
        assert 0.0 <= float(age.removeprefix("age-s=").partition(";")[0]) < 60.0
        assert call_record(said).last_known == age
        async with session.get(gateway.addresses["metrics"] + "/metrics") as response:
            metrics = await response.text()
        assert 'tidegate_cache_last_known_total{code="nothing_alive",model="echo"} 1.0' in metrics
        assert 'tidegate_route_total{reason="last-known",to="cache"} 1.0' in metrics
        shown = await printed_by(explain, [said["tidegate-request-id"], "--admin", gateway.addresses["admin"]])
        assert "from cache (last-known, degraded)" in shown
        assert "old, since nothing else did: nothing_alive: no target offers echo" in shown

        for most in ("0", "0.0", "0.001"):
            refused = await ask(gateway, session, **{"tidegate-max-age-s": most})
            assert (refused[0], refused[1]["code"]) == (503, "nothing_alive"), refused
        assert (await ask(gateway, session, **{"tidegate-max-age-s": "500"}))[0] == 200
        assert (await ask(gateway, session, **{"tidegate-variant": "int8"}))[0] == 503  # it was never answered so
        assert (await other_input(gateway, session, 9))[0] == 503


async def test_off_by_default_and_over_after_its_time(tmp_path: Path) -> None:
    for section, code in (({"ttl_s": 0.05}, 503), ({"ttl_s": 0.05, "stale_for_s": 0.05}, 503), (OLD, 200)):
        far = VersionedFar("pool/main")
        async with gateway_over(tmp_path, far, cache=section) as (gateway, session):
            await ask(gateway, session)
            await lost(gateway, far)
            await clock.sleep(0.15)
            assert (await ask(gateway, session))[0] == code


async def test_a_target_that_refuses_or_falls_silent_leaves_it_and_in_time(tmp_path: Path) -> None:
    far = VersionedFar("pool/main")
    async with gateway_over(tmp_path, far, cache=OLD) as (gateway, session):
        await ask(gateway, session)
        await clock.sleep(0.1)
        far.host.gate.clear()
        code, _, said = await ask(gateway, session, **{"tidegate-budget-ms": "1500"})
        assert (code, said["tidegate-route"].partition(";")[0]) == (200, "last-known")
        assert call_record(said).budget_left_s is not None
        assert (await ask(gateway, session, **{"tidegate-budget-ms": "500", "tidegate-max-age-s": "0"}))[0] == 504
        far.host.gate.set()
        far.host.error = Overloaded("full", retry_after_s=1.0)
        code, _, said = await ask(gateway, session)
        assert (code, said["tidegate-served-by"]) == (200, "cache")


async def test_the_newest_of_a_series_is_given_to_another_input_of_it_and_to_its_tenant_alone(tmp_path: Path) -> None:
    far = VersionedFar("pool/main")
    camera = {"tidegate-series": "camera-7", "tidegate-tenant": "acme"}
    shares = {**OLD, "share_tenants": True, "max_input_bytes": 2}
    async with gateway_over(tmp_path, far, cache=shares) as (gateway, session):
        assert (await other_input(gateway, session, 1, **camera))[0] == 200
        _, newest, _ = await ask(gateway, session, **camera)  # of three bytes: too large for a key of its own
        await lost(gateway, far)

        code, answer, said = await other_input(gateway, session, 2, **camera)

        assert (code, said["tidegate-served-by"]) == (200, "cache"), answer
        assert said["tidegate-last-known"].endswith("; of=series")
        assert answer["outputs"] == newest["outputs"]
        own = await other_input(gateway, session, 1, **camera)  # the same input is the better match
        assert own[2]["tidegate-last-known"].endswith("; of=input")
        for other in ({"tidegate-series": "camera-8"}, {"tidegate-tenant": "till"}, {"tidegate-pin": "edge"}):
            assert (await other_input(gateway, session, 2, **{**camera, **other}))[0] == 503
        assert (await other_input(gateway, session, 2))[0] == 503  # it names no series
        assert (await other_input(gateway, session, 2, **{**camera, "tidegate-max-age-s": "0"}))[0] == 503


async def test_what_has_become_suspect_or_was_replaced_or_unloaded_is_not_given(tmp_path: Path) -> None:
    far = VersionedFar("edge/attic")
    agreement = AgreementConfig.model_validate({})
    async with gateway_over(tmp_path, far, cache=OLD, agreement=agreement, model_control="explicit") as (
        gateway,
        session,
    ):
        await ask(gateway, session)
        await change(gateway, session, "unload")
        assert (await ask(gateway, session))[0] == 503
        await change(gateway, session, "load")
        await lost(gateway, far)
        assert (await ask(gateway, session))[0] == 200
        assert gateway.shadowing is not None
        source = AnswerSource("edge/attic", "echo", "3", "fp32")
        gateway.shadowing.on_turn(AgreementTurn("suspected", source, "differs", 0.0))
        assert (await ask(gateway, session))[0] == 503


async def test_another_artefact_under_the_same_version_has_none(tmp_path: Path) -> None:
    far = VersionedFar("pool/main")
    async with gateway_over(tmp_path, far, cache=OLD, model_control="explicit") as (gateway, session):
        await ask(gateway, session)
        await lost(gateway, far)
        assert (await ask(gateway, session))[0] == 200
        changed = [{"sha256": "1" * 64} for _ in TWO_VARIANTS.variants]
        variants = tuple(
            type(one)(**{**{name: getattr(one, name) for name in one.__struct_fields__}, **new})
            for one, new in zip(TWO_VARIANTS.variants, changed, strict=True)
        )
        write(tmp_path / "models", variants=variants)
        await change(gateway, session, "load")
        assert (await ask(gateway, session))[0] == 503


@pytest.mark.parametrize(
    "words",
    [
        {"tidegate-max-age-s": "soon"},
        {"tidegate-max-age-s": "-1"},
        {"tidegate-max-age-s": "nan"},
        {"tidegate-max-age-s": "1e9"},
        {"tidegate-series": "a b"},
        {"tidegate-series": "x" * 129},
    ],
)
async def test_a_demand_that_cannot_be_read_is_refused(tmp_path: Path, words: dict[str, str]) -> None:
    far = VersionedFar("pool/main")
    async with gateway_over(tmp_path, far, cache=OLD) as (gateway, session):
        code, answer, _ = await ask(gateway, session, **words)
        assert (code, answer["code"]) == (400, "invalid_request")
        assert next(iter(words)) in answer["error"]
