"""A whole gateway with `auth`: common clients, limits, operators' listeners, and the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import openai
import pytest
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from click.testing import CliRunner
from pydantic import ValidationError
from structlog.testing import capture_logs
from tritonclient.utils import InferenceServerException

from gateway.app import Gateway
from gateway.commands.status import status
from gateway.config.gateway import GatewayConfig
from tests.support.gateway.app import BODY, INFER
from tests.support.gateway.guarded import guarded
from tests.support.serving.hosts import echo_request
from tidegate.caller import Grant, UsageLimits
from tidegate.oip.grpc.codec import message_from_request

pytestmark = pytest.mark.slow


async def infer(gateway: Gateway, session: aiohttp.ClientSession, headers: dict[str, str]) -> tuple[int, Any]:
    async with session.post(gateway.addresses["http"] + INFER, json=BODY, headers=headers) as response:
        return response.status, response.headers


@pytest.fixture
def audit() -> Iterator[list[dict[str, Any]]]:
    with capture_logs() as logs:
        yield logs


def lines(logs: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in logs if one.get("audit") == kind]


# Clients that people use


@pytest.mark.clients
async def test_tritonclient_is_let_in_with_a_key_over_http(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (gateway, _, keys, far):
        x = triton_http.InferInput("x", [3], "UINT8").set_data_from_numpy(np.array([1, 2, 3], np.uint8))
        client = triton_http.InferenceServerClient(gateway.addresses["http"].removeprefix("http://"))
        try:
            with pytest.raises(InferenceServerException, match="wants a credential"):
                await client.infer("echo", [x])
            got = await client.infer("echo", [x], headers=keys.headers("good"))
        finally:
            await client.close()
        assert got.as_numpy("y").tolist() == [1, 2, 3]
        assert len(far.host.calls) == 1


@pytest.mark.clients
async def test_tritonclient_is_let_in_with_a_key_over_grpc(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (gateway, _, keys, _far):
        x = triton_grpc.InferInput("x", [3], "UINT8").set_data_from_numpy(np.array([1, 2, 3], np.uint8))
        client = triton_grpc.InferenceServerClient(gateway.addresses["grpc"])
        try:
            with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
                await client.infer("echo", [x])
            got = await client.infer("echo", [x], headers=keys.headers("good"))
        finally:
            await client.close()
        assert got.as_numpy("y").tolist() == [1, 2, 3]


@pytest.mark.clients
async def test_openais_key_is_the_same_key(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (gateway, _, keys, _far):
        base_url = gateway.addresses["http"] + "/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=keys.texts["good"]) as client:
            assert [one.id async for one in await client.models.list()] == []  # echo takes no text
        for name, error in (("expired", openai.AuthenticationError), ("operator", openai.PermissionDeniedError)):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=keys.texts[name]) as client:
                with pytest.raises(error):
                    await client.models.list()


async def test_a_key_may_come_as_x_api_key_but_not_beside_another(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (gateway, session, keys, _):
        good = keys.texts["good"]
        assert (await infer(gateway, session, {"x-api-key": good}))[0] == 200
        assert (await infer(gateway, session, {"x-api-key": good, "authorization": f"bearer {good}"}))[0] == 200
        both = {"x-api-key": good, "authorization": f"Bearer {keys.texts['proxy']}"}
        assert (await infer(gateway, session, both))[0] == 401


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_two_credentials_of_one_name_are_none_over_http_and_grpc(tmp_path: Path, name: str) -> None:
    async with guarded(tmp_path, auth={"anonymous": "guests"}) as (gateway, session, keys, _):
        scheme = "Bearer " if name == "authorization" else ""
        good, other = scheme + keys.texts["good"], scheme + keys.texts["proxy"]
        async with grpc.aio.insecure_channel(gateway.addresses["grpc"]) as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for shown, status in (((good, good), 200), ((good, other), 401), ((other, good), 401), ((good, ""), 401)):
                pairs = [(name, one) for one in shown]
                async with session.post(gateway.addresses["http"] + INFER, json=BODY, headers=pairs) as response:
                    assert response.status == status
                message = message_from_request(echo_request()).SerializeToString()
                if status == 200:
                    await ask(message, metadata=pairs)
                    continue
                with pytest.raises(grpc.aio.AioRpcError, match="two different credentials"):
                    await ask(message, metadata=pairs)


async def test_anonymous_callers_have_a_tenant_where_there_is_one_but_a_wrong_key_is_still_wrong(
    tmp_path: Path,
) -> None:
    async with guarded(tmp_path, auth={"anonymous": "guests"}) as (gateway, session, keys, _):
        assert (await infer(gateway, session, {}))[0] == 200
        assert "guests" in gateway.admission.tenants.quotas
        assert (await infer(gateway, session, keys.headers("wrong")))[0] == 401
        assert (await infer(gateway, session, {"tidegate-tenant": "acme"}))[0] == 403


# Rights and limits reach the request


async def test_what_is_granted_reaches_the_target(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (gateway, session, keys, far):
        keys.add("low", Grant("acme", highest_priority=3))
        assert gateway.guard is not None
        assert gateway.guard.keys is not None
        gateway.guard.keys.look()
        body = {**BODY, "parameters": {"priority": 1}}
        async with session.post(gateway.addresses["http"] + INFER, json=body, headers=keys.headers("low")) as response:
            assert response.status == 200
        (call,) = far.host.calls
        assert call.priority == 3


@pytest.mark.parametrize(
    ("limits", "tenants"),
    [
        (UsageLimits(requests_per_s=2.0), {}),
        (UsageLimits(), {"busy": {"requests_per_s": 2.0}}),
        (UsageLimits(bytes_per_s=9.0), {}),
        (UsageLimits(), {"busy": {"bytes_per_s": 9.0}}),
    ],
)
async def test_over_a_limit_the_answer_is_429_with_the_time_to_wait_and_others_are_served(
    tmp_path: Path, limits: UsageLimits, tenants: dict[str, Any]
) -> None:
    async with guarded(tmp_path, tenants=tenants) as (gateway, session, keys, far):
        keys.add("busy", Grant("busy", limits=limits))
        assert gateway.guard is not None
        assert gateway.guard.keys is not None
        gateway.guard.keys.look()

        got = [await infer(gateway, session, keys.headers("busy")) for _ in range(6)]

        codes = [code for code, _ in got]
        served = codes.index(429)
        assert 0 < served < 4
        assert len(far.host.calls) == codes.count(200)
        wait_ms = int(got[served][1]["retry-after-ms"])
        assert 50 <= wait_ms <= 2000
        assert (await infer(gateway, session, keys.headers("good")))[0] == 200
        async with grpc.aio.insecure_channel(gateway.addresses["grpc"]) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                for _ in range(4):
                    await call(
                        message_from_request(echo_request()).SerializeToString(),
                        metadata=list(keys.headers("busy").items()),
                    )
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "retry-after-ms" in dict(refused.value.trailing_metadata() or ())


async def test_without_auth_a_named_tenant_has_its_limits_too(tmp_path: Path) -> None:
    async with guarded(tmp_path, auth={}, tenants={"crawler": {"requests_per_s": 1.0}}) as parts:
        config = parts[0].config.model_copy(update={"auth": None})
    async with Gateway(config) as gateway, aiohttp.ClientSession() as session:
        said = {"tidegate-tenant": "crawler"}
        got = [(await infer(gateway, session, said))[0] for _ in range(2)]
        assert got == [503, 429]  # its pool is gone by now; the second does not get so far
        assert (await infer(gateway, session, {}))[0] == 503


# Operators


async def test_the_admin_port_on_loopback_needs_no_credential_and_metrics_only_if_configured(tmp_path: Path) -> None:
    async with guarded(tmp_path, metrics_credentials=True) as (gateway, session, keys, _):
        async with session.get(gateway.addresses["admin"] + "/v1/state") as response:
            assert response.status == 200
        for name, code in (("none", 401), ("good", 403), ("operator", 200)):
            url = gateway.addresses["metrics"] + "/metrics"
            async with session.get(url, headers=keys.headers(name)) as response:
                assert response.status == code


async def test_the_admin_port_elsewhere_requires_the_right_and_audits_each_request(
    tmp_path: Path, audit: list[dict[str, Any]]
) -> None:
    async with guarded(tmp_path, admin_host="0.0.0.0") as (gateway, session, keys, _):
        url = gateway.addresses["admin"].replace("0.0.0.0", "127.0.0.1")
        got = {}
        for path in ("/v1/state", "/debug/decisions", "/healthz"):
            for name in ("none", "wrong", "expired", "revoked", "good", "operator"):
                async with session.get(url + path, headers=keys.headers(name)) as response:
                    got[path, name] = response.status
        refused = {"none": 401, "wrong": 401, "expired": 401, "revoked": 401, "good": 403, "operator": 200}
        wanted = {(path, name): code for path in ("/v1/state", "/debug/decisions") for name, code in refused.items()}
        assert got == wanted | {("/healthz", name): 200 for name in refused}

        runner = CliRunner()
        without = await asyncio.to_thread(runner.invoke, status, ["--admin", url], env={"TIDEGATE_API_KEY": ""})
        key = {"TIDEGATE_API_KEY": keys.texts["operator"]}
        shown = await asyncio.to_thread(runner.invoke, status, ["--admin", url], env=key)
    assert (without.exit_code, shown.exit_code) == (1, 0)
    assert "right `admin` into TIDEGATE_API_KEY" in without.stderr
    who = f"key:{keys.records['operator'].id}"
    assert [(one["who"], one["what"], one["status"]) for one in lines(audit, "admin")] == [
        (who, "GET /v1/state", 200), (who, "GET /debug/decisions", 200), (who, "GET /v1/state", 200),
    ]  # fmt: skip


async def test_requests_on_loopback_are_audited_as_local_once_a_minute_with_the_count(
    tmp_path: Path, audit: list[dict[str, Any]]
) -> None:
    async with guarded(tmp_path) as (gateway, session, *_):
        for path, times in (("/v1/state", 3), ("/debug/decisions?last=x", 1), ("/healthz", 2), ("/nothing", 1)):
            for _ in range(times):
                async with session.get(gateway.addresses["admin"] + path) as response:
                    await response.read()
        at_once = len(lines(audit, "admin"))

    assert at_once == 3
    assert [(one["who"], one["peer"], one["what"], one["status"], one["count"]) for one in lines(audit, "admin")] == [
        ("local", "127.0.0.1", "GET /v1/state", 200, 1), ("local", "127.0.0.1", "GET /debug/decisions", 400, 1),
        ("local", "127.0.0.1", "GET /nothing", 404, 1), ("local", "127.0.0.1", "GET /v1/state", 200, 2),
    ]  # fmt: skip


async def test_a_wrong_request_of_an_operator_is_audited_too(tmp_path: Path, audit: list[dict[str, Any]]) -> None:
    async with guarded(tmp_path, admin_host="0.0.0.0") as (gateway, session, keys, _):
        url = gateway.addresses["admin"].replace("0.0.0.0", "127.0.0.1") + "/debug/decisions?last=x"
        async with session.get(url, headers=keys.headers("operator")) as response:
            assert response.status == 400
    assert [(one["what"], one["status"]) for one in lines(audit, "admin")] == [("GET /debug/decisions", 400)]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"admin_host": "0.0.0.0"}, "admin_host '0.0.0.0' lets other machines in"),
        ({"admin_host": "::"}, "admin_host '::' lets other machines in"),
        ({"admin_host": "gateway.example"}, "lets other machines in"),
        ({"metrics_credentials": True}, "metrics_credentials needs `auth`"),
        ({"auth": {}}, "believes no credential"),
        ({"auth": {"anonymous": "guests"}}, "believes no credential"),
        ({"auth": {"keys_file": "k", "anonymous": "no name"}}, "is no tenant's name"),
        ({"attestation": {"allowed": "attested.keys"}}, "attestation needs the section `tls`"),
        ({"auth": {"mtls": {"certificates": [{"name": "dns:a", "tenant": "a"}]}}}, "auth.mtls has no effect"),
        ({"auth": {"mtls": {"certificates": []}}}, "at least 1 item"),
        ({"auth": {"mtls": {"certificates": [{"name": "a", "tenant": "a"}]}}}, "should match pattern"),
    ],
)
def test_a_configuration_that_would_let_in_anyone_is_an_error(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        GatewayConfig(**keys)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_the_admin_port_may_be_on_any_loopback_address(host: str) -> None:
    assert GatewayConfig(admin_host=host).admin_host == host


# The audit


async def test_refusals_are_audited_once_with_their_count_and_no_secret_is_anywhere(
    tmp_path: Path, audit: list[dict[str, Any]]
) -> None:
    async with guarded(tmp_path) as (gateway, session, keys, _):
        for name in ("none", "wrong", "expired", "revoked"):
            for _ in range(5):
                await infer(gateway, session, keys.headers(name))
        keys.add("new", Grant("acme"))
        keys.revoke("good")
        assert gateway.guard is not None
        assert gateway.guard.keys is not None
        gateway.guard.keys.look()
        seen = repr(gateway.guard) + repr(gateway) + repr(gateway.config)

    noted: dict[tuple[str, str], int] = {}
    for one in lines(audit, "refused"):
        noted[one["reason"], one["who"]] = noted.get((one["reason"], one["who"]), 0) + one["count"]
    ids = {name: f"key:{one.id}" for name, one in keys.records.items()}
    assert noted == {
        ("missing", ""): 5, ("wrong", ids["good"]): 5, ("expired", ids["expired"]): 5, ("revoked", ids["revoked"]): 5,
    }  # fmt: skip
    assert len(lines(audit, "refused")) == 8, "one at once, and one for the rest"
    assert [one["ids"] for one in lines(audit, "keys-created")] == [keys.records["new"].id]
    assert [one["ids"] for one in lines(audit, "keys-revoked")] == [keys.records["good"].id]
    for text in keys.texts.values():
        assert text.split("_")[2] not in repr(audit) + seen


async def test_a_forbidden_request_is_audited_too(tmp_path: Path, audit: list[dict[str, Any]]) -> None:
    async with guarded(tmp_path) as (gateway, session, keys, _):
        assert (await infer(gateway, session, keys.headers("narrow")))[0] == 403
        assert (await infer(gateway, session, keys.headers("operator")))[0] == 403
        assert (await infer(gateway, session, {**keys.headers("good"), "tidegate-tenant": "rival"}))[0] == 403
    who = [f"key:{keys.records[name].id}" for name in ("narrow", "operator", "good")]
    assert [(one["reason"], one["who"]) for one in lines(audit, "refused")] == [("forbidden", one) for one in who]


async def test_a_call_that_is_on_its_way_carries_no_secret(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (gateway, session, keys, far):
        far.host.gate.clear()
        asking = asyncio.ensure_future(infer(gateway, session, keys.headers("good")))
        await far.host.begun.acquire()
        inside = repr(far.host.calls) + repr(list(gateway.dispatcher.recorder))
        far.host.gate.set()
        assert (await asking)[0] == 200
    assert keys.texts["good"][-64:] not in inside
