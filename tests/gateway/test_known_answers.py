"""Known answers through a whole gateway: real connections, and targets whose answers say which version made them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from click.testing import CliRunner

from gateway.app import Gateway
from gateway.commands.explain import explain
from gateway.commands.status import status
from gateway.config.agreement import AgreementConfig
from gateway.config.cache import CacheConfig
from gateway.core.agreement.agreement_watch import AgreementTurn, AnswerSource
from gateway.delivery.trials import SplitRequest
from tests.support.gateway.app import TWO_VARIANTS, Far, ask, config_over, gateway_for, running, target, until
from tests.support.serving.hosts import EchoHost
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Manifest
from tidegate.outcome import Overloaded
from tidegate.types import Call, Datatype, InferResponse, Reply, Tensor

pytestmark = pytest.mark.slow


class VersionedHost(EchoHost):
    """Each element of its answer is its version."""

    def __init__(self, version: str, variant: str) -> None:
        super().__init__()
        self._version, self._variant = version, variant

    def manifest(self, name: str, version: str = "") -> Manifest:
        return msgspec.structs.replace(TWO_VARIANTS, version=self._version)

    def _reply(self, call: Call) -> Reply:
        size = len(call.request.inputs[0].raw)
        output = Tensor("y", Datatype.UINT8, (size,), bytes([int(self._version)]) * size)
        answer = InferResponse("echo", self._version, (output,), id=call.request.id)
        return Reply(answer, stages={"queue": 0.001, "compute": 0.002}, variant=self._variant)


class VersionedFar(Far):
    """Serves one version in one variant."""

    def __init__(self, name: str, version: str = "3", variant: str = "fp32", quality: float = 1.0) -> None:
        super().__init__(name, variant=variant)
        offered = VariantOffer(variant, variant, ((1.0, 0.002), (100.0, 0.004)), quality=quality)
        self.offers = (ModelOffer("echo", version, (offered,)),)
        self.version = version
        self.host = VersionedHost(version, variant)

    @property
    def calls(self) -> int:
        return len(self.host.calls)


def write(root: Path, version: str = "3", **changes: Any) -> None:
    home = root / "echo" / version
    home.mkdir(parents=True, exist_ok=True)
    manifest = msgspec.structs.replace(TWO_VARIANTS, version=version, **changes)
    (home / "model.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(manifest)))


@asynccontextmanager
async def gateway_over(
    folder: Path, *fars: VersionedFar, cache: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    for far in fars:
        write(folder / "models", far.version)
    section = CacheConfig.model_validate({"models": {"echo": {}}, **(cache or {})})
    async with running(*fars):
        config = config_over(folder / "models", *[target(far) for far in fars], cache=section, **more)
        async with gateway_for(config) as (gateway, session):
            yield gateway, session


def is_known(headers: dict[str, str]) -> bool:
    known = headers["tidegate-served-by"] == "cache"
    assert headers["tidegate-route"].startswith("cached; ") is known
    return known


def version_in(body: dict[str, Any]) -> str:
    assert body["outputs"][0]["data"] == [int(body["model_version"])] * 3
    return str(body["model_version"])


async def test_the_second_equal_request_is_answered_from_memory_and_says_so_everywhere(tmp_path: Path) -> None:
    far = VersionedFar("pool/main")
    async with gateway_over(tmp_path, far) as (gateway, session):
        _, first, before = await ask(gateway, session)
        code, second, headers = await ask(gateway, session)
        assert (code, is_known(before), is_known(headers), far.calls) == (200, False, True, 1)
        assert second["outputs"] == first["outputs"]
        route = "cached; variant=fp32; attempts=0; hedged=0; fallback=0; degraded=0; provisional=0"
        assert headers["tidegate-route"] == route
        assert float(headers["tidegate-budget-left-ms"]) > 0
        assert "server-timing" not in headers
        async with session.get(gateway.addresses["metrics"] + "/metrics") as response:
            metrics = await response.text()
        assert 'tidegate_cache_requests_total{model="echo",outcome="hit"} 1.0' in metrics
        assert 'tidegate_cache_requests_total{model="echo",outcome="miss"} 1.0' in metrics
        assert 'tidegate_cache_answers{model="echo"} 1.0' in metrics
        assert 'tidegate_route_total{reason="cached",to="cache"} 1.0' in metrics
        async with session.get(gateway.addresses["admin"] + "/v1/state") as response:
            (row,) = (await response.json())["cache"]
        assert row == {"model": "echo", "hits": 1, "lookups": 2, "kept": 1, "bytes": row["bytes"]}
        admin, asked = gateway.addresses["admin"], headers["tidegate-request-id"]
        shown = await printed_by(explain, [asked, "--admin", admin])
        assert "from cache (cached)" in shown
        assert "1 of 2 requests answered" in await printed_by(status, ["--admin", admin])


async def printed_by(command: Any, words: list[str]) -> str:
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, command, words)
    assert result.exit_code == 0, result.output
    return result.output


async def test_tenants_share_answers_only_where_they_may(tmp_path: Path) -> None:
    for shares in (False, True):
        far = VersionedFar("pool/main")
        async with gateway_over(tmp_path, far, cache={"share_tenants": shares}) as (gateway, session):
            await ask(gateway, session, **{"tidegate-tenant": "acme"})
            assert is_known((await ask(gateway, session, **{"tidegate-tenant": "acme"}))[2])
            assert is_known((await ask(gateway, session, **{"tidegate-tenant": "other"}))[2]) is shares


async def test_a_lower_variant_is_never_given_to_a_caller_that_demands_a_higher_one(tmp_path: Path) -> None:
    edge = VersionedFar("edge/attic", variant="int8", quality=0.9)
    pool = VersionedFar("pool/main", variant="fp32", quality=1.0)
    async with gateway_over(tmp_path, edge, pool) as (gateway, session):
        for demand in ({"tidegate-variant": "int8"}, {"tidegate-pin": "edge"}, {}):
            await ask(gateway, session, **demand)
        for demand in ({"tidegate-variant": "fp32"}, {"tidegate-min-quality": "0.95"}):
            _, _, headers = await ask(gateway, session, **demand)
            assert (is_known(headers), "variant=fp32" in headers["tidegate-route"]) == (False, True)
            _, _, headers = await ask(gateway, session, **demand)
            assert (is_known(headers), "variant=fp32" in headers["tidegate-route"]) == (True, True)


async def test_a_degraded_answer_is_not_kept(tmp_path: Path) -> None:
    edge = VersionedFar("edge/attic", variant="int8", quality=0.5)
    pool = VersionedFar("pool/main", variant="fp32", quality=1.0)
    async with gateway_over(tmp_path, edge, pool) as (gateway, session):
        pool.host.error = Overloaded("full", retry_after_s=0.01)
        _, _, headers = await ask(gateway, session)
        assert "degraded=1" in headers["tidegate-route"]
        assert gateway.known_answers is not None
        assert len(gateway.known_answers.cache) == 0


async def test_a_version_that_is_lost_promoted_or_on_trial_takes_its_known_answers_with_it(tmp_path: Path) -> None:
    old, new = VersionedFar("pool/old", "3"), VersionedFar("pool/new", "4")
    async with gateway_over(tmp_path, old, new) as (gateway, session):

        async def answered() -> tuple[str, bool]:
            _, body, headers = await ask(gateway, session)
            return version_in(body), is_known(headers)

        assert [await answered(), await answered()] == [("4", False), ("4", True)]

        # on trial: every request is computed, and counted
        await gateway.trials.begin("echo", SplitRequest("3", share=0.0))
        before = new.calls
        assert [await answered(), await answered()] == [("4", False), ("4", False)]
        assert new.calls == before + 2

        # promoted: what the other version had answered is not given, and comes back with it
        await gateway.trials.promote("echo")
        assert [await answered(), await answered()] == [("3", False), ("3", True)]

        # a demanded version has its own
        async def demanded(version: str) -> tuple[str, bool]:
            url = gateway.addresses["http"] + f"/v2/models/echo/versions/{version}/infer"
            body = {"inputs": [{"name": "x", "datatype": "UINT8", "shape": [3], "data": [1, 2, 3]}]}
            async with session.post(url, json=body) as response:
                return version_in(await response.json()), is_known(dict(response.headers))

        assert [await demanded("4"), await demanded("4")] == [("4", False), ("4", True)]

        # the preferred one is lost: the other answers, and none of the lost one's answers is given for it
        await old.kill()
        await until(lambda: not _up(gateway, "pool/old"))
        assert (await answered())[0] == "4"


async def change(gateway: Gateway, session: aiohttp.ClientSession, what: str) -> None:
    url = f"{gateway.addresses['http']}/v2/repository/models/echo/{what}"
    async with session.post(url, headers={"authorization": f"Bearer {gateway.operator_token.value}"}) as response:
        assert response.status == 200, await response.text()


def _up(gateway: Gateway, name: str) -> bool:
    return bool(gateway.fleet.targets[name].up)


async def test_without_a_target_that_serves_its_version_a_known_answer_is_not_given(tmp_path: Path) -> None:
    far = VersionedFar("pool/main")
    async with gateway_over(tmp_path, far) as (gateway, session):
        await ask(gateway, session)
        await far.kill()
        await until(lambda: not _up(gateway, "pool/main"))
        assert (await ask(gateway, session))[0] == 503
        await far.start()
        await until(lambda: _up(gateway, "pool/main"))
        assert is_known((await ask(gateway, session))[2])


async def test_an_unload_refuses_and_another_artefact_under_the_same_version_is_computed(tmp_path: Path) -> None:
    far = VersionedFar("pool/main")
    async with gateway_over(tmp_path, far, model_control="explicit") as (gateway, session):
        await ask(gateway, session)
        assert is_known((await ask(gateway, session))[2])
        await change(gateway, session, "unload")
        assert (await ask(gateway, session))[0] == 503
        await change(gateway, session, "load")  # the same to the last byte
        assert is_known((await ask(gateway, session))[2])
        variants = tuple(msgspec.structs.replace(one, sha256="1" * 64) for one in TWO_VARIANTS.variants)
        write(tmp_path / "models", variants=variants)
        await change(gateway, session, "load")
        assert not is_known((await ask(gateway, session))[2])
        assert is_known((await ask(gateway, session))[2])


async def test_a_device_whose_answers_drift_loses_what_it_has_answered(tmp_path: Path) -> None:
    far = VersionedFar("edge/attic")
    async with gateway_over(tmp_path, far, agreement=AgreementConfig.model_validate({})) as (gateway, session):
        await ask(gateway, session)
        assert gateway.known_answers is not None and gateway.shadowing is not None
        for target_id, turn, known in (("edge/other", "demoted", True), ("edge/attic", "suspected", False)):
            source = AnswerSource(target_id, "echo", "3", "fp32")
            gateway.shadowing.on_turn(AgreementTurn(turn, source, "differs", 0.0))  # type: ignore[arg-type]
            assert is_known((await ask(gateway, session))[2]) is known


async def test_a_manifest_may_forbid_it_and_attested_requests_never_are(tmp_path: Path) -> None:
    far = VersionedFar("pool/main")
    async with gateway_over(tmp_path, far, model_control="explicit") as (gateway, session):
        await ask(gateway, session)
        write(tmp_path / "models", cacheable=False)
        await change(gateway, session, "load")
        assert [is_known((await ask(gateway, session))[2]) for _ in range(2)] == [False, False]
        assert (await ask(gateway, session, **{"tidegate-require": "attested"}))[0] == 503


async def test_known_answers_take_no_place_and_charge_their_tenant(tmp_path: Path) -> None:
    far = VersionedFar("pool/main")
    tenants = {"default": {"requests_per_s": 10.0}}
    async with gateway_over(tmp_path, far, tenants=tenants, max_in_flight=1) as (gateway, session):
        await ask(gateway, session)
        far.host.gate.clear()
        other = {"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1], "data": [9]}]}
        url = gateway.addresses["http"] + "/v2/models/echo/infer"
        slow = asyncio.create_task(session.post(url, json=other, headers={"tidegate-budget-ms": "20000"}))
        await until(lambda: gateway.admission.in_flight == 1)
        answers = await asyncio.gather(*(ask(gateway, session) for _ in range(40)))
        far.host.gate.set()
        (await slow).close()
        known = [is_known(headers) for code, _, headers in answers if code == 200]
        assert known and all(known)  # although the only place is taken
        assert {code for code, _, _ in answers} == {200, 429}  # and its tenant may ask ten times a second


async def test_without_the_section_there_is_no_layer(tmp_path: Path) -> None:
    write(tmp_path / "models")
    far = VersionedFar("pool/main")
    async with running(far), gateway_for(config_over(tmp_path / "models", target(far))) as (gateway, session):
        assert gateway.known_answers is None
        assert [is_known((await ask(gateway, session))[2]) for _ in range(2)] == [False, False]
        async with session.get(gateway.addresses["metrics"] + "/metrics") as response:
            assert "tidegate_cache" not in await response.text()
