"""Attested placement from the outside, over TLS: which targets are asked and refused, and with what words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from rich.console import Console
from structlog.testing import capture_logs

from gateway.app import Gateway
from gateway.commands.explain import in_full
from gateway.commands.status import targets_table
from gateway.config.gateway import GatewayConfig
from tests.gateway.test_request_constraints import configured
from tests.support.certificates import FleetPki
from tests.support.gateway.app import BODY, INFER, MAX_BYTES, Far, running, target
from tests.support.serving.hosts import echo_request
from tidegate import clock
from tidegate.link.attestation_challenge import Attest, no_evidence
from tidegate.oip.grpc.codec import message_from_request
from tidegate.rpc import oip_pb2
from tidegate.security.attestation.attester import AttestationConfig, Attester
from tidegate.security.attestation.keys import line_of, make_key, read_key
from tidegate.security.attestation.measurement import Measurement
from tidegate.security.attestation.software import key_id
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.role_guard import ServerSecurity

pytestmark = pytest.mark.slow

ATTESTED = {"tidegate-require": "attested"}


class Site:
    """A CA, a list of allowed keys, and edges in miniature that show certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pki = FleetPki(folder / "pki")
        self.allowed = folder / "attested.keys"
        self.allowed.write_text("")
        self.fars: dict[str, Far] = {}
        self._stack = AsyncExitStack()

    def attester(self, name: str, key: str | None = None) -> Attester:
        """One for edge NAME, with a key of its own that is allowed."""
        path = self.folder / f"{key or name}.key"
        if not path.exists():
            self.allow(line_of(make_key(path), name))
        what = Measurement("1.0", ())
        return Attester(AttestationConfig(key=path), self.pki.tls(f"edge/{name}"), lambda: what)

    def allow(self, line: str) -> None:
        self.allowed.write_text(self.allowed.read_text() + line + "\n")

    def key_id(self, name: str) -> str:
        return key_id(read_key(self.folder / f"{name}.key").public_key().public_bytes_raw())

    async def edge(self, name: str, attest: Attest = no_evidence) -> None:
        far = self.fars[name] = Far(f"edge/{name}")
        secured = ServerSecurity(self.pki.tls(f"edge/{name}"), frozenset({"gateway"}))
        door = await self._stack.enter_async_context(
            open_grpc_server(
                lambda server: far.add_to(server, attest),
                "127.0.0.1",
                0,
                max_message_bytes=MAX_BYTES,
                grace_s=0.1,
                secured=secured,
            )
        )
        await door.server.start()
        far.port = int(door.address.rpartition(":")[2])

    @asynccontextmanager
    async def gateway(
        self,
        *,
        manifest: dict[str, Any] | None = None,
        roads: dict[str, dict[str, Any]] | None = None,
        **attestation: Any,
    ) -> AsyncIterator[Client]:
        """Args: roads: how some targets are called, by name, as keys of their configuration."""
        targets = [target(far, **(roads or {}).get(name, {})) for name, far in self.fars.items()]
        section = {"allowed": self.allowed, **attestation}
        plain = configured(self.folder, *targets, **(manifest or {}))
        config = GatewayConfig(
            **plain.model_dump() | {"tls": self.pki.config("gateway/main").model_dump(), "attestation": section}
        )
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.pki.client()))
        async with Gateway(config) as gateway, session:
            await gateway.static_targets_tried(30.0)
            yield Client(gateway, session, self.pki)

    async def __aenter__(self) -> Site:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


class Client:
    """Asks one gateway."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession, pki: FleetPki) -> None:
        self.gateway = gateway
        self._session = session
        self._pki = pki

    async def http(self, parameters: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        body = BODY | ({"parameters": parameters} if parameters else {})
        async with self._session.post(self.gateway.addresses["http"] + INFER, json=body, headers=headers) as response:
            return response.status, await response.json(), dict(response.headers)

    async def admin(self, path: str) -> Any:
        async with self._session.get(self.gateway.addresses["admin"] + path) as response:
            return await response.json()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        credentials = grpc.ssl_channel_credentials(self._pki.store.ca_cert.read_bytes())
        async with grpc.aio.secure_channel(self.gateway.addresses["grpc"], credentials) as channel:
            yield channel

    def stands(self, name: str) -> str:
        return str(self.gateway.fleet.targets[f"edge/{name}"].attestation)

    async def until_stands(self, name: str, words: str, within_s: float = 30.0) -> None:
        async with asyncio.timeout(within_s):
            while words not in self.stands(name):
                await clock.sleep(0.01)


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr("tidegate.runtime.followed_file.POLL_S", 0.1)
    monkeypatch.setattr("gateway.targets.attestation_verifier.FIRST_RETRY_S", 0.1)
    async with Site(tmp_path) as one:
        yield one


async def test_marked_requests_go_to_the_attested_edge_only_and_say_by_what_evidence(site: Site) -> None:
    await site.edge("plain")
    await site.edge("proven", site.attester("proven").answer)
    async with site.gateway() as client:
        await client.until_stands("proven", "software")
        said = f"software; key={site.key_id('proven')}; expires="
        for headers, parameters in ((ATTESTED, None), ({}, ATTESTED)):
            for _ in range(5):
                status, body, told = await client.http(parameters, **headers)
                assert (status, told["tidegate-served-by"]) == (200, "edge/proven")
                assert told["tidegate-attested"].startswith(said)
                assert body["parameters"]["tidegate-attested"] == told["tidegate-attested"]
        assert site.fars["plain"].host.calls == []

        async with client.channel() as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            call = infer(message_from_request(echo_request()).SerializeToString(), metadata=tuple(ATTESTED.items()))
            answer = oip_pb2.ModelInferResponse.FromString(await call)
            trailers = dict(await call.trailing_metadata())
        assert answer.parameters["tidegate-served-by"].string_param == "edge/proven"
        assert trailers["tidegate-attested"].startswith(said)

        _, _, told = await client.http()
        assert "tidegate-attested" not in told  # nobody asked what it rests on

        targets = {one["id"]: one for one in (await client.admin("/v1/state"))["targets"]}
        assert targets["edge/proven"]["attested"] and targets["edge/proven"]["attestation"].startswith(said)
        assert targets["edge/plain"]["attestation"].endswith("its configuration has no section `attestation`")
        told_people = Console(width=300, file=StringIO())
        told_people.print(targets_table(list(targets.values())))
        in_full((await client.admin("/debug/decisions?last=3"))["decisions"][1], told_people)
        words = told_people.file.getvalue()  # type: ignore[attr-defined]  # it is the one above
        assert said in words and "none: it has no evidence" in words
        assert "attested targets only" in words and "not edge/plain in fp32: not attested: it has no evidence" in words

        decision = (await client.admin("/debug/decisions?last=3"))["decisions"][1]
        assert decision["attested"] is True
        assert [one["target"] for one in decision["passed_over"]] == ["edge/plain"]
        assert decision["passed_over"][0]["why_not"].startswith("not attested: it has no evidence")


async def test_without_evidence_such_requests_are_refused_with_each_targets_reason(site: Site) -> None:
    await site.edge("plain")
    async with site.gateway() as client:
        await client.until_stands("plain", "no section")
        status, body, told = await client.http(**ATTESTED)
        assert (status, told["tidegate-refused"]) == (503, "nothing_alive")
        assert "edge/plain is not attested: it has no evidence" in body["error"]
        async with client.channel() as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.aio.AioRpcError, match="edge/plain is not attested") as caught:
                await infer(message_from_request(echo_request()).SerializeToString(), metadata=tuple(ATTESTED.items()))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await client.http())[0] == 200
        assert (await client.http(**{"tidegate-require": "attestd"}))[0] == 400


async def test_a_model_so_marked_needs_no_word_of_its_callers(site: Site) -> None:
    await site.edge("plain")
    await site.edge("proven", site.attester("proven").answer)
    async with site.gateway(manifest={"require": "attested"}) as client:
        await client.until_stands("proven", "software")
        for _ in range(5):
            assert (await client.http())[2]["tidegate-served-by"] == "edge/proven"
        site.allowed.write_text("")
        await client.until_stands("proven", "is not among those allowed")
        assert (await client.http())[0] == 503
        assert site.fars["plain"].host.calls == []


async def test_a_revoked_key_is_out_within_seconds_and_one_that_is_allowed_again_is_in(site: Site) -> None:
    await site.edge("proven", site.attester("proven").answer)
    async with site.gateway() as client:
        await client.until_stands("proven", "software")
        allowed = site.allowed.read_text()
        site.allowed.write_text("# nobody\n")
        await client.until_stands("proven", f"its attestation key {site.key_id('proven')} is not among those allowed")
        assert (await client.http(**ATTESTED))[0] == 503
        with capture_logs() as logs:
            site.allowed.write_text("ed25519 nonsense\n")
            async with asyncio.timeout(30.0):
                while not any(one["event"] == "the attestation keys stay as they were" for one in logs):
                    await clock.sleep(0.01)
        site.allowed.write_text(allowed)
        await client.until_stands("proven", "software")
        assert (await client.http(**ATTESTED))[0] == 200


def replaying(of: Attester) -> Attest:
    """The first evidence that was ever made, for every later question."""
    first: list[bytes] = []

    def answer(nonce: bytes, asker: bytes | None) -> bytes:
        first.append(of.answer(nonce, asker))
        return first[0]

    return answer


def with_another_nonce(of: Attester) -> Attest:
    return lambda _nonce, asker: of.answer(b"?" * 32, asker)


def without_a_certificate(of: Attester) -> Attest:
    return lambda nonce, _asker_key: of.answer(nonce, None)


def relayed(of: Attester, by: bytes) -> Attest:
    """What the true edge would tell somebody in the middle, who has a certificate of his own."""
    return lambda nonce, _asker_key: of.answer(nonce, by)


WRONG: dict[str, tuple[Callable[[Site], Attest], str]] = {
    "another edge's": (lambda site: site.attester("other").answer, "is edge/other's, and this is edge/here"),
    "for another question": (lambda site: with_another_nonce(site.attester("here")), "another challenge"),
    "through a relay": (
        lambda site: relayed(site.attester("here"), Path(site.pki.config("gateway/thief").cert).read_bytes()),
        "another challenge or connection",
    ),
    "without certificates": (lambda site: without_a_certificate(site.attester("here")), "shows no certificate"),
    "junk": (lambda _site: lambda _nonce, _asker_key: b"junk", "cannot be read"),
    "a defect": (lambda _site: lambda _nonce, _asker_key: bytes(1 // 0), "internal error"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_wrong_evidence_is_refused_and_nothing_is_sent_there(site: Site, what: str) -> None:
    make, words = WRONG[what]
    await site.edge("here", make(site))
    async with site.gateway() as client:
        await client.until_stands("here", words)
        status, body, _ = await client.http(**ATTESTED)
        assert status == 503 and words in body["error"]
        assert site.fars["here"].host.calls == []
        assert (await client.http())[0] == 200


async def test_evidence_that_is_shown_twice_counts_no_second_time(site: Site) -> None:
    await site.edge("here", replaying(site.attester("here")))
    async with site.gateway() as client:
        await client.until_stands("here", "software")
        link = site.fars["here"].link
        assert link is not None
        offered = site.fars["here"].offers
        site.fars["here"].offers = (*offered, offered[0].__class__("more", "1", ()))
        link.announce()  # other offers are another measurement: the gateway asks anew
        await client.until_stands("here", "another challenge")
        assert (await client.http(**ATTESTED))[0] == 503


async def test_evidence_ends_where_no_new_one_is_given(site: Site) -> None:
    true, refused, willing = site.attester("here"), 0, True

    def while_willing(nonce: bytes, asker: bytes | None) -> bytes:
        nonlocal refused
        if not willing:
            refused += 1
            raise ValueError("not again")
        return true.answer(nonce, asker)

    await site.edge("here", while_willing)
    async with site.gateway(max_age_s=5.0) as client:

        async def is_answered() -> bool:
            return (await client.http(**ATTESTED, **{"tidegate-budget-ms": "1000"}))[0] == 200

        await client.until_stands("here", "software")
        async with asyncio.timeout(60.0):
            while not await is_answered():
                await clock.sleep(0.05)
        status, body, _ = await client.http(**ATTESTED, **{"tidegate-budget-ms": "60000"})
        assert status == 503 and "before the deadline" in body["error"]
        willing = False
        async with asyncio.timeout(60.0):
            while await is_answered() or not refused:
                await clock.sleep(0.05)


async def test_evidence_is_renewed_before_it_ends(site: Site) -> None:
    await site.edge("here", site.attester("here").answer)
    async with site.gateway(max_age_s=5.0) as client:
        await client.until_stands("here", "software")
        first = client.gateway.fleet.targets["edge/here"].attestation
        async with asyncio.timeout(30.0):
            while client.gateway.fleet.targets["edge/here"].attestation == first:
                await clock.sleep(0.02)
        assert client.gateway.fleet.targets["edge/here"].attestation.until > first.until


async def test_a_renewed_gateway_certificate_leaves_connections_and_their_evidence_alone(site: Site) -> None:
    await site.edge("here", site.attester("here").answer)
    async with site.gateway(max_age_s=5.0) as client:
        await client.until_stands("here", "software")
        first = client.gateway.fleet.targets["edge/here"].attestation
        site.pki.issue("gateway/main")
        async with asyncio.timeout(30.0):
            while client.gateway.fleet.targets["edge/here"].attestation == first:
                await clock.sleep(0.02)
        assert client.stands("here").startswith("software")


async def test_a_target_that_is_slow_to_prove_itself_is_asked_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.targets.attestation_verifier.ANSWERS_WITHIN_S", 0.0)
    await site.edge("here", site.attester("here").answer)
    async with site.gateway() as client:
        await client.until_stands("here", "it answered no challenge within 0 s")
        assert (await client.http(**ATTESTED))[0] == 503
        monkeypatch.setattr("gateway.targets.attestation_verifier.ANSWERS_WITHIN_S", 5.0)
        await client.until_stands("here", "software")
        assert (await client.http(**ATTESTED))[0] == 200


async def test_targets_without_tls_and_those_called_by_unary_grpc_are_never_attested(site: Site) -> None:
    await site.edge("unary", site.attester("unary").answer)
    plain = Far("edge/plain")
    async with running(plain):
        site.fars["plain"] = plain
        roads = {"plain": {"tls": False}, "unary": {"transport": "unary"}}
        async with site.gateway(roads=roads) as client:
            await client.until_stands("plain", "it is called without TLS")
            await client.until_stands("unary", "it is called by unary gRPC")
            status, body, _ = await client.http(**ATTESTED)
            assert status == 503
            assert "edge/plain is not attested: it is called without TLS" in body["error"]
            assert (await client.http())[0] == 200


def test_a_challenge_of_another_length_gets_words(tmp_path: Path) -> None:
    site = Site(tmp_path)
    attester = site.attester("here")
    asker = site.pki.config("gateway/main").cert.read_bytes()
    for nonce, shown, words in ((b"short", asker, "32 bytes, not 5"), (b"n" * 32, b"junk", "cannot be used")):
        with pytest.raises(ValueError, match=words):
            attester.answer(nonce, shown)


async def test_only_allowed_measurements_do_where_they_are_named(site: Site) -> None:
    await site.edge("here", site.attester("here").answer)
    digest = Measurement("1.0", ()).digest
    async with site.gateway(measurements=("f" * 64,)) as client:
        await client.until_stands("here", f"its measurement {digest} is not among those allowed")
        assert (await client.http(**ATTESTED))[0] == 503
