"""TLS between the parts on real sockets: which callers gRPC, link stream and HTTP let in, and which they refuse."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import ssl
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkUp
from gateway.targets.link import LinkTarget
from gateway.targets.unary import UnaryTarget
from tests.support.certificates import FleetPki, serial_shown
from tests.support.gateway.app import Far, configured, until
from tests.support.serving.hosts import echo_request
from tidegate import clock
from tidegate.link.service import LinkService
from tidegate.link.session import KeepaliveTiming
from tidegate.link.streams import SERVICE as LINK_SERVICE
from tidegate.oip.grpc.server import OipService
from tidegate.runtime.process import StartError
from tidegate.security.certificate_identity import CertificateIdentity, Role
from tidegate.security.tls import Dialler, PlainDialler, Tls, TlsConfig, check_encrypted, tls_of
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.http_server import open_http_server
from tidegate.servers.role_guard import RoleGuard, ServerSecurity

pytestmark = pytest.mark.slow

MAX_BYTES = 2**22
GATEWAYS: frozenset[Role] = frozenset({"gateway"})
LOCAL: frozenset[Role] = frozenset({"gateway", "client"})
EDGE_1 = CertificateIdentity("edge", "edge-1")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> FleetPki:
    return FleetPki(tmp_path_factory.mktemp("pki") / "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> FleetPki:
    """Another CA, which signs for the same names."""
    return FleetPki(tmp_path_factory.mktemp("pki") / "theirs")


@asynccontextmanager
async def edge(
    tls: Tls | None, roles: frozenset[Role] = GATEWAYS, narrowed: Mapping[str, frozenset[Role]] | None = None
) -> AsyncIterator[str]:
    """An edge in miniature, OIP and the link stream on one port; where it listens."""
    far = Far("edge/edge-1")

    def add_services(server: grpc.aio.Server) -> None:
        OipService(far.host, max_message_bytes=MAX_BYTES).add_to(server)
        LinkService(
            far.host,
            name=far.name,
            epoch=lambda: 1,
            offers=lambda: far.offers,
            load=far.load,
            heartbeat=KeepaliveTiming(0.1, 300),
        ).add_to(server)

    secured = ServerSecurity(tls, roles, narrowed=narrowed or {}) if tls else None
    async with open_grpc_server(
        add_services, "127.0.0.1", 0, max_message_bytes=MAX_BYTES, grace_s=0.1, secured=secured
    ) as door:
        await door.server.start()
        yield door.address


Told = list[LinkEvent]
Make = Callable[[str, Dialler, Told], Any]


def link(address: str, dialler: Dialler, told: Told) -> LinkTarget:
    return LinkTarget(
        "edge/edge-1", address, gateway_name="main", on_event=told.append, draw=lambda: 0.1, dialler=dialler
    )


def unary(address: str, dialler: Dialler, told: Told) -> UnaryTarget:
    return UnaryTarget(
        "edge/edge-1", address, foreign=False, on_event=told.append, probe_interval_s=0.05, dialler=dialler
    )


both_roads = pytest.mark.parametrize("make", [link, unary])


async def ask(target: Any) -> bytes:
    reply = await target.infer(
        echo_request(), variant="", budget_s=5.0, priority=0, traceparent="", on_accepted=lambda _: None
    )
    return bytes(reply.response.outputs[0].raw)


async def first_word(make: Make, address: str, dialler: Dialler) -> LinkEvent:
    """What a dial comes to: up or down."""
    told: Told = []

    def word() -> LinkEvent | None:
        return next((one for one in told if isinstance(one, LinkUp | LinkDown)), None)

    async with make(address, dialler, told):
        await until(lambda: word() is not None)
    found = word()
    assert found is not None
    return found


@both_roads
async def test_a_gateway_and_the_edge_that_it_means_talk(pki: FleetPki, make: Make) -> None:
    async with edge(pki.tls("edge/edge-1")) as address:
        told: Told = []
        async with make(address, pki.tls("gateway/main").dialler(EDGE_1), told) as target:
            await until(lambda: any(isinstance(one, LinkUp) for one in told))
            assert await ask(target) == b"abc"


@both_roads
@pytest.mark.parametrize("server", ["edge/edge-2", "gateway/other", "pool/edge-1"])
async def test_another_server_in_the_edges_place_gets_no_request(pki: FleetPki, make: Make, server: str) -> None:
    async with edge(pki.tls(server)) as address:
        word = await first_word(make, address, pki.tls("gateway/main").dialler(EDGE_1))
    assert isinstance(word, LinkDown)
    assert "shows the certificate of another part" in word.reason


@both_roads
async def test_an_edge_of_another_ca_an_ended_one_and_one_without_tls_get_no_request(
    pki: FleetPki, strangers: FleetPki, make: Make
) -> None:
    dialler = pki.tls("gateway/main").dialler(EDGE_1)
    cases = (
        (strangers.tls("edge/edge-1"), "not of the CA"),
        (pki.tls("edge/edge-1", ended=True), "has ended"),
        (None, "speaks no TLS"),
    )
    for tls, why in cases:
        async with edge(tls) as address:
            word = await first_word(make, address, dialler)
        assert isinstance(word, LinkDown)
        assert why in word.reason


@both_roads
@pytest.mark.parametrize("caller", ["edge/edge-2", "client/reports"])
async def test_an_edge_works_for_gateways_only_and_says_so(pki: FleetPki, make: Make, caller: str) -> None:
    async with edge(pki.tls("edge/edge-1")) as address:
        with capture_logs() as logs:
            word = await first_word(make, address, pki.tls(caller).dialler(EDGE_1))
    assert isinstance(word, LinkDown)
    assert f"this needs the certificate of a gateway; yours is {caller}'s" in word.reason
    assert any(one["event"] == "refused a caller" for one in logs)


async def test_a_device_answers_local_clients_over_grpc_and_opens_its_link_to_gateways_only(pki: FleetPki) -> None:
    dialler = pki.tls("client/reports").dialler(EDGE_1)
    async with edge(pki.tls("edge/edge-1"), LOCAL, {LINK_SERVICE: GATEWAYS}) as address:
        assert isinstance(await first_word(unary, address, dialler), LinkUp)
        refused = await first_word(link, address, dialler)
        assert isinstance(refused, LinkDown)
        assert "this needs the certificate of a gateway; yours is client/reports's" in refused.reason
        assert isinstance(await first_word(link, address, pki.tls("gateway/main").dialler(EDGE_1)), LinkUp)


@both_roads
async def test_a_gateway_of_another_ca_an_ended_one_and_one_without_tls_are_not_let_in(
    pki: FleetPki, strangers: FleetPki, make: Make
) -> None:
    forged = Tls(strangers.config("gateway/main").model_copy(update={"ca": pki.store.ca_cert}))
    ended = pki.tls("gateway/main", ended=True)
    async with edge(pki.tls("edge/edge-1")) as address:
        for dialler in (forged.dialler(EDGE_1), ended.dialler(EDGE_1), PlainDialler()):
            assert isinstance(await first_word(make, address, dialler), LinkDown)


async def test_a_caller_without_a_certificate_does_not_reach_an_edge(pki: FleetPki) -> None:
    bare = grpc.ssl_channel_credentials(pki.store.ca_cert.read_bytes())
    options = (("grpc.ssl_target_name_override", EDGE_1.host),)
    async with (
        edge(pki.tls("edge/edge-1")) as address,
        grpc.aio.secure_channel(address, bare, options=options) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=3.0)
    assert refusal.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")  # to be refused with it
@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_downgraded_handshake_is_refused(pki: FleetPki, door: str) -> None:
    old = pki.client("gateway/main")
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    served = edge(pki.tls("edge/edge-1")) if door == "grpc" else site(pki.tls("edge/edge-1"), GATEWAYS)
    async with served as address:
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(serial_shown, address.removeprefix("https://"), old)


class Seen:
    """A call's context, as far as a guard looks."""

    def __init__(self, version: bytes) -> None:
        self.version = version
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"ssl_tls_version": [self.version], "x509_subject_alternative_name": [b"tidegate://gateway/main"]}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, words: str) -> None:
        self.refusal = code, words


@pytest.mark.parametrize(("version", "refused"), [(b"TLSv1.2", True), (b"TLSv1.3", False)])
async def test_between_our_own_parts_an_agreed_tls_1_2_is_refused_by_name(version: bytes, refused: bool) -> None:
    context = Seen(version)
    await RoleGuard(GATEWAYS, "1.3").admit(context)  # type: ignore[arg-type]  # as far as it looks
    assert context.refusal == (
        (grpc.StatusCode.PERMISSION_DENIED, "this needs TLSv1.3, not TLSv1.2") if refused else None
    )


# -- HTTP ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def site(tls: Tls, roles: frozenset[Role] = frozenset()) -> AsyncIterator[str]:
    async def hello(_request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async with open_http_server(
        [web.get("/", hello)],
        "127.0.0.1",
        0,
        key="http_port",
        max_body_bytes=1024,
        grace_s=0.1,
        secured=ServerSecurity(tls, roles),
    ) as address:
        yield address


async def get(address: str, context: ssl.SSLContext) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(address, ssl=context) as response:
        return response.status, await response.text()


async def test_a_gateways_callers_need_no_certificate_unless_it_is_demanded(pki: FleetPki) -> None:
    async with site(pki.tls("gateway/main")) as address:
        assert address.startswith("https://")
        assert await get(address, pki.client()) == (200, "hello")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await get(address, ssl.create_default_context())
    async with site(pki.tls("gateway/main", require_client_cert=True)) as address:
        assert await get(address, pki.client("client/reports")) == (200, "hello")
        with pytest.raises(aiohttp.ClientError):
            await get(address, pki.client())


async def test_callers_of_another_ca_are_let_in_where_that_is_configured(pki: FleetPki, strangers: FleetPki) -> None:
    section = {"require_client_cert": True, "client_ca": strangers.store.ca_cert}
    theirs = strangers.config("client/reports")
    caller = pki.client()
    caller.load_cert_chain(theirs.cert, theirs.key)
    async with site(pki.tls("gateway/main", **section)) as address:
        assert await get(address, caller) == (200, "hello")
        with pytest.raises(aiohttp.ClientError):
            await get(address, pki.client("client/reports"))


async def test_over_http_the_role_counts_too(pki: FleetPki, strangers: FleetPki) -> None:
    async with site(pki.tls("edge/edge-1"), frozenset({"gateway", "client"})) as address:
        assert (await get(address, pki.client("client/reports")))[0] == 200
        status, words = await get(address, pki.client("edge/edge-2"))
        assert status == 403 and "yours is edge/edge-2's" in words
        for refused in (pki.client("client/reports", ended=True), pki.client()):
            with pytest.raises(aiohttp.ClientError):
                await get(address, refused)


async def test_tls_1_2_is_refused_where_1_3_is_asked_for(pki: FleetPki) -> None:
    old = pki.client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with site(pki.tls("gateway/main")) as address:
        assert (await get(address, old))[0] == 200
    async with site(pki.tls("gateway/main", min_version="1.3")) as address:
        with pytest.raises(aiohttp.ClientError):
            await get(address, old)


# -- renewal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_renewed_certificate_is_shown_by_a_server_that_goes_on_serving(pki: FleetPki, door: str) -> None:
    tls = pki.tls("edge/edge-1")
    caller = pki.client("gateway/main")
    served = edge(tls) if door == "grpc" else site(tls, GATEWAYS)
    async with served as address:
        before = await asyncio.to_thread(serial_shown, address.removeprefix("https://"), caller)
        renewed = pki.issue("edge/edge-1")
        after = await asyncio.to_thread(serial_shown, address.removeprefix("https://"), caller)
    assert before != renewed == after


async def test_a_link_that_stands_outlives_the_renewal_of_both_ends_and_the_next_uses_it(pki: FleetPki) -> None:
    gateway = pki.tls("gateway/main")
    async with edge(pki.tls("edge/edge-1")) as address:
        told: Told = []
        async with link(address, gateway.dialler(EDGE_1), told) as target:
            await until(lambda: target.connected)
            pki.issue("edge/edge-1")
            pki.issue("gateway/main")
            assert await ask(target) == b"abc"
            assert not any(isinstance(one, LinkDown) for one in told)
        assert isinstance(await first_word(link, address, gateway.dialler(EDGE_1)), LinkUp)


async def test_a_gateway_whose_certificate_had_ended_gets_through_once_it_is_renewed(pki: FleetPki) -> None:
    async with edge(pki.tls("edge/edge-1")) as address:
        for make in (link, unary):
            gateway = pki.tls("gateway/late", ended=True)
            told: Told = []
            async with make(address, gateway.dialler(EDGE_1), told) as target:  # type: ignore[operator]
                await until(lambda told=told: any(isinstance(one, LinkDown) for one in told))  # type: ignore[misc]
                pki.issue("gateway/late")
                await until(lambda told=told: any(isinstance(one, LinkUp) for one in told))  # type: ignore[misc]
                assert await ask(target) == b"abc"


async def test_files_that_do_not_fit_leave_the_old_ones_in_use_and_are_complained_of_once(pki: FleetPki) -> None:
    section = pki.config("edge/edge-1")
    tls = Tls(section)
    good, caller = section.cert.read_bytes(), pki.client("gateway/main")
    async with site(tls, GATEWAYS) as address:
        with capture_logs() as logs:
            section.cert.write_bytes(pki.store.cert(CertificateIdentity.parse("gateway/main")).read_bytes())
            assert (await get(address, caller))[0] == (await get(address, caller))[0] == 200
            section.cert.unlink()
            assert (await get(address, caller))[0] == (await get(address, caller))[0] == 200
        complaints = [one["reason"] for one in logs if "cannot be used" in one["event"]]
        assert len(complaints) == 2
        assert "is not the key of" in complaints[0] and "No such file" in complaints[1]
        section.cert.write_bytes(good)
        assert (await get(address, caller))[0] == 200


@pytest.mark.parametrize(
    ("who", "begins_in_h", "words"),
    [
        ("edge/edge-2", 0.0, "is edge/edge-2's, and this is edge/edge-1"),
        ("edge/edge-1", -48.0, "ended at"),
        ("edge/edge-1", 5.0, "begins at"),
    ],
)
def test_a_certificate_that_peers_would_refuse_does_not_take_the_place_of_one_that_they_take(
    pki: FleetPki, monkeypatch: pytest.MonkeyPatch, who: str, begins_in_h: float, words: str
) -> None:
    section = pki.config("edge/edge-1")
    tls = tls_of(section, lambda: EDGE_1)
    assert tls is not None
    identity, before = CertificateIdentity.parse(who), tls.fresh().cert
    begins = datetime.fromtimestamp(clock.utc_s(), UTC) + timedelta(hours=begins_in_h)
    pki.store.issue(identity, (), days=1, now=begins)
    for source, target in ((pki.store.key(identity), section.key), (pki.store.cert(identity), section.cert)):
        if source != target:
            shutil.copyfile(source, target)
    with capture_logs() as logs:
        assert tls.fresh().cert == tls.fresh().cert == before
    assert len(logs) == 1 and words in logs[0]["reason"] and logs[0]["log_level"] == "warning"
    if begins_in_h > 0:
        utc_s, now = clock.utc_s() + 6 * 3600.0, clock.now() + 2.0
        monkeypatch.setattr(clock, "utc_s", lambda: utc_s)
        monkeypatch.setattr(clock, "now", lambda: now)
        assert tls.fresh().cert == section.cert.read_bytes() != before, "it is good by now"


def test_what_has_ended_gives_way_to_whatever_comes(pki: FleetPki) -> None:
    section = pki.config("edge/edge-1", ended=True)
    with capture_logs():
        tls = tls_of(section, lambda: EDGE_1)
    assert tls is not None
    begins = datetime.fromtimestamp(clock.utc_s(), UTC) + timedelta(hours=5)
    pki.store.issue(EDGE_1, (), days=1, now=begins)
    assert tls.fresh().cert == section.cert.read_bytes()


def test_a_renewed_certificate_is_taken_though_it_could_not_be_read_at_first(
    pki: FleetPki, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor was left in the handshake that looked first; the files do not change when there are some."""

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    tls = pki.tls("edge/edge-1")
    now, before = [clock.now()], tls.fresh().cert
    monkeypatch.setattr(clock, "now", lambda: now[0])
    pki.issue("edge/edge-1")
    with capture_logs() as logs, monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", none_left)
        for _ in range(3):
            now[0] += 1.0
            assert tls.fresh().cert == before
    assert [one["reason"] for one in logs] == ["Too many open files"]
    assert tls.fresh().cert == before, "it is not read in each handshake"
    now[0] += 1.0
    assert tls.fresh().cert == tls.config.cert.read_bytes() != before


def test_a_file_whose_rights_are_mended_is_read_at_once(pki: FleetPki, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = pki.tls("edge/edge-1")
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    pki.issue("edge/edge-1")
    read = Path.read_bytes

    def only_readable(path: Path) -> bytes:
        if not path.stat().st_mode & stat.S_IROTH:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", only_readable)  # tests may be root's, which reads everything
    for path in (tls.config.cert, tls.config.key, tls.config.ca):
        path.chmod(0o644)
    tls.config.key.chmod(0o600)
    before = tls.fresh()
    tls.config.key.chmod(0o644)
    assert tls.fresh() != before
    tls.config.key.chmod(0o600)


def test_files_that_were_only_touched_make_no_channel_a_different_one(pki: FleetPki) -> None:
    tls = pki.tls("gateway/main")
    dialler = tls.dialler(EDGE_1)
    before = dialler.version
    with capture_logs() as logs:
        tls.config.cert.touch()
        tls.config.key.chmod(tls.config.key.stat().st_mode)
        assert dialler.version == before
        pki.issue("gateway/main")
        assert dialler.version != before
    assert len(logs) == 1
    assert "PRIVATE KEY" not in repr(before)


# -- the section ---------------------------------------------------------------------------------------------------


def test_a_certificate_that_is_another_parts_is_found_at_the_start(pki: FleetPki) -> None:
    with pytest.raises(
        StartError, match=r"is edge/edge-2's, and this is edge/edge-1: `tidegate pki issue edge/edge-1`"
    ):
        tls_of(pki.config("edge/edge-2"), lambda: EDGE_1)
    with pytest.raises(StartError, match="key 'name'"):
        tls_of(pki.config("edge/edge-2"), lambda: CertificateIdentity("edge", "Edge 1"))
    assert tls_of(None, lambda: EDGE_1) is None


def test_a_certificate_near_its_end_is_logged_with_the_remedy(pki: FleetPki) -> None:
    with capture_logs() as logs:
        tls_of(pki.config("edge/edge-1", ended=True), lambda: EDGE_1)
    assert "is expired: `tidegate pki renew`" in logs[0]["event"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.cert.unlink(), "No such file"),
        (lambda one: one.key.write_bytes(b"junk"), "is not PEM"),
        (lambda one: one.cert.write_bytes(b""), "is not PEM"),
        (lambda one: one.ca.write_bytes(b"junk"), "is not PEM"),
    ],
)
def test_files_that_cannot_be_used_end_the_start_in_words(
    tmp_path: Path, change: Callable[[TlsConfig], object], words: str
) -> None:
    section = FleetPki(tmp_path / "pki").config("edge/edge-1")
    change(section)
    with pytest.raises(StartError, match=f"the section 'tls' cannot be used: .*{words}"):
        Tls(section)


def test_a_broker_without_encryption_is_refused_beside_a_tls_section_and_no_password_is_shown(pki: FleetPki) -> None:
    tls = pki.tls("edge/edge-1")
    check_encrypted("mqtts://edge-1:secret@broker", tls)
    check_encrypted("mqtt://broker", None)
    with pytest.raises(StartError) as refusal:
        check_encrypted("mqtt://edge-1:secret@broker:1883", tls)
    assert "mqtts://" in str(refusal.value) and "secret" not in str(refusal.value)


def test_tls_to_a_target_needs_the_gateways_own_section(tmp_path: Path) -> None:
    far = {"name": "triton", "address": "triton.example:8001", "foreign": True, "models": ["m"], "tls": True}
    with pytest.raises(ValueError, match="target 'triton' has tls: true"):
        configured(tmp_path, far)  # type: ignore[arg-type]
