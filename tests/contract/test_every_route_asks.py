"""Every route of a gateway with `auth` asks for a credential: the real route tables are walked, so a new route that is
neither guarded nor named here as open fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from gateway.app import Gateway
from tests.support.gateway.app import BODY, Far, until
from tests.support.gateway.guarded import REFUSED, Keys, guarded
from tests.support.serving.hosts import echo_request
from tidegate.caller import Grant
from tidegate.oip.grpc.codec import message_from_request
from tidegate.oip.grpc.reflection import SERVICE
from tidegate.rpc import oip_pb2

pytestmark = pytest.mark.slow

OPEN_HTTP = {
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/openapi.json"),
    ("*", "/v1/{tail:(?s:.*)}"),
}
OPEN_GRPC = {
    f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}  # fmt: skip
_NAMES = {"{model}": "echo", "{version}": "3", "{region}": "r"}

Parts = tuple[Gateway, aiohttp.ClientSession, Keys, Far]


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    async with guarded(tmp_path) as found:
        yield found


def http_routes(gateway: Gateway) -> Iterator[tuple[str, str]]:
    for route in gateway.inference_routes():
        if (route.method, route.path) not in OPEN_HTTP:
            yield route.method, route.path


class Methods:
    """In a server's place: notes what is put on it."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            self.found |= handler._method_handlers  # noqa: SLF001  # gRPC lists a handler's methods nowhere else

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self.found |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


def grpc_methods(gateway: Gateway) -> Iterator[tuple[str, bool]]:
    methods = Methods()
    gateway.add_services(methods)  # type: ignore[arg-type]
    assert methods.found.keys() >= OPEN_GRPC
    for path, handler in methods.found.items():
        if path not in OPEN_GRPC:
            yield path, handler.request_streaming


async def http_refusal(
    gateway: Gateway, session: aiohttp.ClientSession, method: str, path: str, headers: dict[str, str]
) -> tuple[int, str, str]:
    for slot, name in _NAMES.items():
        path = path.replace(slot, name)
    body = BODY if path.endswith("/infer") else {"model": "echo", "input": "hi"} if "embeddings" in path else {}
    sent = {"json": body} if method == "POST" else {}
    async with session.request(method, gateway.addresses["http"] + path, headers=headers, **sent) as response:  # type: ignore[arg-type]
        return (
            response.status,
            response.headers.get("tidegate-refused", ""),
            response.headers.get("WWW-Authenticate", ""),
        )


def asked_of(path: str) -> bytes:
    """A message that names the model wherever the method has a place for it."""
    if path.endswith(("Infer",)):
        return message_from_request(echo_request()).SerializeToString()
    if "RepositoryModel" in path:
        return oip_pb2.RepositoryModelLoadRequest(model_name="echo").SerializeToString()
    return oip_pb2.ModelMetadataRequest(name="echo").SerializeToString() if "/Model" in path else b""


async def grpc_status(gateway: Gateway, path: str, streaming: bool, headers: dict[str, str]) -> tuple[str, str]:
    async with grpc.aio.insecure_channel(gateway.addresses["grpc"]) as channel:
        metadata = list(headers.items())
        try:
            if streaming:
                call = channel.stream_stream(path)(iter([asked_of(path)]), metadata=metadata)
                raw = [one async for one in call]
                return _said_in_stream(raw[0])
            await channel.unary_unary(path)(asked_of(path), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            words = dict(error.trailing_metadata() or ())
            return error.code().name, str(words.get("www-authenticate", ""))
    return "OK", ""


def _said_in_stream(raw: bytes) -> tuple[str, str]:
    answer = oip_pb2.ModelStreamInferResponse.FromString(raw)
    return (answer.infer_response.parameters["tidegate-code"].string_param if answer.error_message else "OK"), ""


@pytest.mark.parametrize("credential", REFUSED)
async def test_every_http_route_refuses_who_does_not_prove_who_it_is(parts: Parts, credential: str) -> None:
    gateway, session, keys, far = parts
    routes = list(http_routes(gateway))
    assert len(routes) > 30

    got = {route: await http_refusal(gateway, session, *route, keys.headers(credential)) for route in routes}

    reason = "" if credential == "none" else ', error="invalid_token"'
    assert got == dict.fromkeys(routes, (401, "unauthenticated", f'Bearer realm="tidegate"{reason}'))
    assert far.host.calls == []


@pytest.mark.parametrize("credential", REFUSED)
async def test_every_grpc_method_refuses_who_does_not_prove_who_it_is(parts: Parts, credential: str) -> None:
    gateway, _, keys, far = parts
    methods = list(grpc_methods(gateway))
    assert len(methods) > 15
    assert (f"/{SERVICE}/ModelStreamInfer", True) in methods

    got = {path: await grpc_status(gateway, path, stream, keys.headers(credential)) for path, stream in methods}

    reason = "" if credential == "none" else ', error="invalid_token"'
    assert got == {path: ("UNAUTHENTICATED", f'Bearer realm="tidegate"{reason}') for path, _ in methods}
    assert far.host.calls == []


async def test_no_route_about_a_model_answers_who_may_not_use_it_and_nobody_learns_whether_it_exists(
    parts: Parts,
) -> None:
    gateway, session, keys, far = parts
    about_models = [route for route in http_routes(gateway) if "{model}" in route[1] or "embeddings" in route[1]]
    served = [one for one in about_models if not one[1].endswith(("/generate", "/generate_stream", "/trace/setting"))]
    assert len(served) > 10

    got = {route: (await http_refusal(gateway, session, *route, keys.headers("narrow")))[:2] for route in served}

    assert got == dict.fromkeys(served, (403, "forbidden"))
    answers = []
    for model in ("echo", "there-is-none"):
        url = f"{gateway.addresses['http']}/v2/models/{model}"
        async with session.get(url, headers=keys.headers("narrow")) as response:
            answers.append((response.status, (await response.text()).replace(model, "MODEL")))
    assert answers[0] == answers[1]
    assert far.host.calls == []


async def test_no_grpc_method_about_a_model_answers_who_may_not_use_it(parts: Parts) -> None:
    gateway, _, keys, far = parts
    about_models = [one for one in grpc_methods(gateway) if "/Model" in one[0] or "RepositoryModel" in one[0]]
    assert len(about_models) == 8

    got = {path: (await grpc_status(gateway, path, stream, keys.headers("narrow")))[0] for path, stream in about_models}

    wanted = {path: "forbidden" if stream else "PERMISSION_DENIED" for path, stream in about_models}
    assert got == wanted
    assert far.host.calls == []


async def test_a_good_key_opens_every_route(parts: Parts) -> None:
    gateway, session, keys, _ = parts
    http = {one: (await http_refusal(gateway, session, *one, keys.headers("good")))[0] for one in http_routes(gateway)}
    over_grpc = {
        path: (await grpc_status(gateway, path, stream, keys.headers("good")))[0]
        for path, stream in grpc_methods(gateway)
    }

    assert not {401, 403, 500} & set(http.values()), http
    assert http["POST", "/v2/models/{model}/infer"] == http["GET", "/v2/models/stats"] == 200
    assert not {"UNAUTHENTICATED", "PERMISSION_DENIED", "forbidden", "INTERNAL"} & set(over_grpc.values()), over_grpc
    assert over_grpc[f"/{SERVICE}/ModelInfer"] == over_grpc[f"/{SERVICE}/ModelStreamInfer"] == "OK"


async def test_lists_hold_what_the_caller_may_use_and_no_more(parts: Parts) -> None:
    gateway, session, keys, _ = parts
    url = gateway.addresses["http"]

    async def listed(name: str) -> tuple[Any, ...]:
        headers = keys.headers(name)
        async with session.post(f"{url}/v2/repository/index", headers=headers) as response:
            index = await response.json()
        async with session.get(f"{url}/v2/models/stats", headers=headers) as response:
            stats = (await response.json())["model_stats"]
        return [one["name"] for one in index], [one["name"] for one in stats]

    assert await listed("good") == (["echo"], ["echo"])
    assert await listed("narrow") == ([], [])
    async with session.get(f"{url}/v2/models/other-x", headers=keys.headers("narrow")) as response:
        assert (response.status, (await response.json())["error"]) == (
            404, "no model is called 'other-x'; known models: none",
        )  # fmt: skip


async def test_a_key_that_has_no_right_to_use_models_sees_none_of_them(parts: Parts) -> None:
    gateway, session, keys, _ = parts
    headers = keys.headers("operator")
    assert (await http_refusal(gateway, session, "POST", "/v2/models/echo/infer", headers))[0] == 403
    assert (await http_refusal(gateway, session, "POST", "/v2/repository/index", headers))[0] == 403


async def test_health_is_open_to_everybody(parts: Parts) -> None:
    gateway, session, *_ = parts
    for path in ("/v2/health/live", "/v2/health/ready"):
        async with session.get(gateway.addresses["http"] + path) as response:
            assert response.status == 200
    for name in ("ServerLive", "ServerReady"):
        assert await grpc_status(gateway, f"/{SERVICE}/{name}", False, {}) == ("OK", "")


async def test_who_belongs_to_a_tenant_cannot_speak_for_another_but_a_proxy_can(parts: Parts) -> None:
    gateway, session, keys, _ = parts
    url, tenants = gateway.addresses["http"] + "/v2/models/echo/infer", gateway.admission.tenants

    async def as_tenant(key: str, tenant: str) -> int:
        headers = {**keys.headers(key), "tidegate-tenant": tenant}
        async with session.post(url, json=BODY, headers=headers) as response:
            return response.status

    assert await as_tenant("good", "rival") == 403
    assert "rival" not in tenants.quotas
    assert await as_tenant("good", "acme") == 200
    assert await as_tenant("proxy", "rival") == 200
    assert {"acme", "proxy", "rival"} <= tenants.quotas.keys()


async def test_a_key_revoked_while_the_gateway_runs_is_refused_also_on_a_stream_that_is_open(parts: Parts) -> None:
    gateway, session, keys, _ = parts
    path = f"/{SERVICE}/ModelStreamInfer"
    async with grpc.aio.insecure_channel(gateway.addresses["grpc"]) as channel:
        call = channel.stream_stream(path)(metadata=list(keys.headers("good").items()))
        await call.write(asked_of(path))
        assert _said_in_stream(await call.read()) == ("OK", "")

        keys.revoke("good")
        assert gateway.guard is not None
        assert gateway.guard.keys is not None
        gateway.guard.keys.look()

        await call.write(asked_of(path))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert refused.value.details() == f"API key {keys.records['good'].id} was revoked"
    assert (await http_refusal(gateway, session, "GET", "/v2", keys.headers("good")))[0] == 401


async def test_a_key_made_while_the_gateway_runs_is_good_within_a_second_or_two(parts: Parts) -> None:
    gateway, session, keys, _ = parts
    keys.add("late", Grant("late"))
    assert gateway.guard is not None
    ring = gateway.guard.keys
    assert ring is not None
    await until(lambda: keys.records["late"].id in ring.ids)
    assert (await http_refusal(gateway, session, "GET", "/v2", keys.headers("late")))[0] == 200
