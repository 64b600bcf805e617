"""Artefacts over HTTP: ranges that resume, a store in which names match contents, and hostile paths."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gateway.config.auth import AuthConfig
from gateway.delivery.artifacts.access import credential_check, secured_for_devices
from gateway.delivery.artifacts.pacing import BytePacer
from gateway.delivery.artifacts.server import PIECE_BYTES, ArtifactServer
from gateway.delivery.artifacts.store import ArtifactStore, OffsetMismatch, WrongContent
from gateway.delivery.artifacts.upload import MAX_PIECE_BYTES, intake_routes
from gateway.identity.audit import Audit
from gateway.identity.guard import GatewayGuard
from tests.support.certificates import FleetPki
from tests.support.gateway.doors import admission_of
from tests.support.gateway.guarded import keys_in
from tests.support.serving.host import FakeHost
from tidegate import clock
from tidegate.oip.http.server import error_middleware
from tidegate.security.tls import Tls
from tidegate.servers.http_server import open_http_server

CONTENT = bytes(range(256)) * 4096  # 1 MiB
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PATH = f"/artifacts/sha256/{DIGEST}"
UPLOAD = f"/v1/artifacts/sha256/{DIGEST}"


def stored(root: Path, content: bytes = CONTENT) -> ArtifactStore:
    store, digest = ArtifactStore(root), hashlib.sha256(content).hexdigest()
    store.append(digest, 0, content)
    store.finish(digest)
    return store


@asynccontextmanager
async def served(routes: list[web.RouteDef]) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    door = open_http_server(routes, "127.0.0.1", 0, key="artifacts.port", max_body_bytes=2**20, grace_s=0.1)
    async with door as address, aiohttp.ClientSession() as session:
        yield address, session


async def test_a_broken_off_download_goes_on_where_it_was(tmp_path: Path) -> None:
    async with (
        served(ArtifactServer(stored(tmp_path)).routes()) as (url, http),
        http.get(url + PATH, headers={"Range": "bytes=0-299999"}) as first,
    ):
        got = await first.read()
        assert (first.status, first.headers["Content-Range"]) == (206, f"bytes 0-299999/{len(CONTENT)}")
        going_on = {"Range": f"bytes={len(got)}-", "If-Range": first.headers["ETag"]}
        async with http.get(url + PATH, headers=going_on) as rest:
            got += await rest.read()

    assert rest.status == 206 and got == CONTENT


@pytest.mark.parametrize(
    ("headers", "status", "length"),
    [
        ({}, 200, len(CONTENT)),
        ({"Range": "bytes=0-9", "If-Range": '"another"'}, 200, len(CONTENT)),
        ({"Range": "bytes=0-9", "If-Range": f'"{DIGEST}"'}, 206, 10),
        ({"Range": "bytes=0-9,20-29"}, 200, len(CONTENT)),
        ({"Range": "garbage"}, 200, len(CONTENT)),
        ({"Range": f"bytes={len(CONTENT)}-"}, 416, None),
        ({"If-None-Match": f'"{DIGEST}"'}, 304, 0),
    ],
)
async def test_what_a_device_may_ask(tmp_path: Path, headers: dict[str, str], status: int, length: int | None) -> None:
    async with (
        served(ArtifactServer(stored(tmp_path)).routes()) as (url, http),
        http.get(url + PATH, headers=headers) as answer,
    ):
        body = await answer.read()

    assert answer.status == status
    assert length is None or len(body) == length
    if status == 416:
        assert answer.headers["Content-Range"] == f"bytes */{len(CONTENT)}"


async def test_head_returns_the_size_and_no_body(tmp_path: Path) -> None:
    async with served(ArtifactServer(stored(tmp_path)).routes()) as (url, http), http.head(url + PATH) as answer:
        assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(CONTENT)))
        assert answer.headers["ETag"] == f'"{DIGEST}"' and answer.headers["Accept-Ranges"] == "bytes"


@pytest.mark.parametrize(
    "path",
    [
        "/artifacts/sha256/" + "0" * 64,
        "/artifacts/sha256/..%2f..%2fsecret",
        "/artifacts/sha256/../../secret",
        "/artifacts/sha256/" + DIGEST.upper(),
        "/artifacts/sha256/" + DIGEST + "%00",
        "/artifacts/sha256/" + DIGEST + "%0a",
        "/artifacts/sha256/",
        "/secret",
    ],
)
async def test_only_names_of_contents_lead_to_files(tmp_path: Path, path: str) -> None:
    store = stored(tmp_path / "store")
    (tmp_path / "secret").write_text("a secret")
    async with served(ArtifactServer(store).routes()) as (url, _):
        # By hand: clients tidy paths before they send them.
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()

    assert b" 404 " in answer.splitlines()[0] and b"a secret" not in answer


async def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    store = stored(tmp_path / "store")
    (tmp_path / "secret").write_text("a secret")
    store.path("0" * 64).symlink_to(tmp_path / "secret")
    async with (
        served(ArtifactServer(store).routes()) as (url, http),
        http.get(f"{url}/artifacts/sha256/{'0' * 64}") as answer,
    ):
        assert answer.status == 404


@pytest.mark.slow
async def test_downloads_beyond_the_limit_get_503_with_retry_after(tmp_path: Path) -> None:
    door = ArtifactServer(stored(tmp_path), max_concurrent=1, pace=BytePacer(PIECE_BYTES * 10.0))
    async with served(door.routes()) as (url, http), http.get(url + PATH) as first:
        await first.content.readany()
        async with http.get(url + PATH) as second:
            assert second.status == 503 and int(second.headers["Retry-After"]) > 0
        assert len(await first.read()) > 0
        async with http.get(url + PATH) as again:
            assert again.status == 200 and await again.read() == CONTENT
    assert door.under_way == 0 and door.served_bytes == 2 * len(CONTENT)


async def test_a_refused_client_is_refused_before_anything_is_looked_up(tmp_path: Path) -> None:
    async def nobody(_: web.Request, _held: ExitStack) -> None:
        raise web.HTTPForbidden

    async with (
        served(ArtifactServer(ArtifactStore(tmp_path / "none"), admit=nobody).routes()) as (url, http),
        http.get(url + PATH) as answer,
    ):
        assert answer.status == 403


# taking in


def piece(first: int, last: int) -> tuple[bytes, dict[str, str]]:
    return CONTENT[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(CONTENT)}"}


async def test_an_upload_goes_on_after_it_broke_off_and_is_there_once_whole(tmp_path: Path) -> None:
    store, half = ArtifactStore(tmp_path), len(CONTENT) // 2
    async with served(intake_routes(store)) as (url, http):
        body, headers = piece(0, half - 1)
        async with http.put(url + UPLOAD, data=body, headers=headers) as first:
            assert first.status == 202
        assert store.size_bytes(DIGEST) is None
        async with http.put(url + UPLOAD, data=body, headers=headers) as twice:
            assert (twice.status, twice.headers["Upload-Offset"]) == (409, str(half))
        async with http.head(url + UPLOAD) as where:
            assert (where.status, where.headers["Upload-Offset"]) == (404, str(half))
        body, headers = piece(half, len(CONTENT) - 1)
        async with http.put(url + UPLOAD, data=body, headers=headers) as second:
            assert second.status == 201
        async with http.head(url + UPLOAD) as whole:
            assert whole.status == 200

    assert store.path(DIGEST).read_bytes() == CONTENT and store.offset_bytes(DIGEST) == 0


@pytest.mark.slow
async def test_an_upload_whose_sender_leaves_while_it_is_hashed_ends_whole_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, hashing, goes_on = ArtifactStore(tmp_path), threading.Event(), threading.Event()
    finish = store.finish

    def slow(digest: str) -> int:
        hashing.set()
        assert goes_on.wait(10.0)
        return finish(digest)

    monkeypatch.setattr(store, "finish", slow)
    body, headers = piece(0, len(CONTENT) - 1)
    async with served(intake_routes(store)) as (url, http):
        sending = asyncio.create_task(http.put(url + UPLOAD, data=body, headers=headers))
        assert await asyncio.to_thread(hashing.wait, 10.0)
        sending.cancel()
        await clock.sleep(0.1)  # the server hears of it
        async with http.put(url + UPLOAD, data=b"", headers={"Content-Range": f"bytes */{len(CONTENT)}"}) as again:
            assert (again.status, await again.text()) == (409, "another upload of the same content is under way")
        goes_on.set()
        async with asyncio.timeout(10.0):
            while store.size_bytes(DIGEST) is None:
                await clock.sleep(0.01)
    assert finish(DIGEST) == len(CONTENT), "said again, it is what it was"


async def test_an_upload_with_another_digest_is_deleted(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    async with served(intake_routes(store)) as (url, http):
        headers = {"Content-Range": "bytes 0-4/5"}
        async with http.put(url + UPLOAD, data=b"wrong", headers=headers) as answer:
            assert answer.status == 422 and hashlib.sha256(b"wrong").hexdigest() in await answer.text()

    assert store.size_bytes(DIGEST) is None and store.offset_bytes(DIGEST) == 0


@pytest.mark.parametrize(
    "said",
    ["", "bytes 0-4/4", "bytes 4-0/5", "bytes 0-4", f"bytes 0-{MAX_PIECE_BYTES}/{2 * MAX_PIECE_BYTES}", "items 0-4/5"],
)
async def test_a_piece_that_does_not_say_where_it_belongs_is_refused(tmp_path: Path, said: str) -> None:
    async with (
        served(intake_routes(ArtifactStore(tmp_path))) as (url, http),
        http.put(url + UPLOAD, data=b"12345", headers={"Content-Range": said}) as answer,
    ):
        assert answer.status == 400


async def test_a_folder_that_cannot_be_used_is_named_and_is_no_internal_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = ArtifactStore(tmp_path / "file" / "artifacts")
    async with served(intake_routes(store)) as (url, http):
        async with http.head(url + UPLOAD) as asked:
            assert asked.status == 503
        piece = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}"}
        async with http.put(url + UPLOAD, data=CONTENT, headers=piece) as answer:
            assert answer.status == 503
            words = await answer.text()
    assert str(tmp_path / "file") in words and "Not a directory (key 'artifacts.folder')" in words


async def test_an_empty_file_is_a_content_too(tmp_path: Path) -> None:
    store, digest = ArtifactStore(tmp_path), hashlib.sha256(b"").hexdigest()
    async with served(intake_routes(store)) as (url, http):
        where = f"{url}/v1/artifacts/sha256/{digest}"
        async with http.put(where, headers={"Content-Range": "bytes */0"}) as answer:
            assert answer.status == 201
    assert store.size_bytes(digest) == 0


def test_a_store_takes_pieces_in_order_only(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    store.append(DIGEST, 0, CONTENT[:10])

    with pytest.raises(OffsetMismatch) as refused:
        store.append(DIGEST, 20, CONTENT[20:])
    with pytest.raises(WrongContent):
        store.finish(DIGEST)

    assert refused.value.offset_bytes == 10


# who may fetch


@pytest.mark.slow
async def test_over_tls_a_device_of_ours_may_fetch_and_nobody_else(tmp_path: Path) -> None:
    ours, strangers = FleetPki(tmp_path / "ours"), FleetPki(tmp_path / "strangers")
    # Callers' certificates are of another CA, as where a company has one of its own: that opens no door here.
    tls = Tls(ours.config("gateway/main", client_ca=strangers.store.ca_cert))
    secured = secured_for_devices(tls)
    door = open_http_server(
        ArtifactServer(stored(tmp_path / "store"), admit=credential_check(None, secured)).routes(),
        "127.0.0.1",
        0,
        key="artifacts.port",
        max_body_bytes=4096,
        grace_s=0.1,
        secured=secured,
    )

    async def status(context: ssl.SSLContext) -> int:
        async with aiohttp.ClientSession() as http, http.get(url + PATH, ssl=context) as answer:
            return answer.status

    async with door as url:
        assert await status(ours.client("edge/kiosk-1")) == 200
        assert await status(ours.client("gateway/other")) == 403
        foreign = ours.client()
        section = strangers.config("edge/kiosk-1")
        foreign.load_cert_chain(section.cert, section.key)
        for nobody in (ours.client(), foreign):
            with pytest.raises(aiohttp.ClientError):
                await status(nobody)


async def test_where_no_certificate_is_demanded_the_gateways_auth_asks_for_a_key(tmp_path: Path) -> None:
    pki, keys = FleetPki(tmp_path / "pki"), keys_in(tmp_path)
    asking = secured_for_devices(Tls(pki.config("gateway/main", require_client_cert=False)))
    async with GatewayGuard(AuthConfig(keys_file=keys.path), FakeHost(), admission_of(), Audit()) as guard:
        assert credential_check(guard, asking) is not None
        assert credential_check(guard, secured_for_devices(Tls(pki.config("gateway/main")))) is None
        routes = ArtifactServer(stored(tmp_path / "store"), admit=credential_check(guard, None)).routes()
        door = open_http_server(
            routes, "127.0.0.1", 0, key="x", max_body_bytes=1, grace_s=0.1, middlewares=[error_middleware]
        )
        async with door as url, aiohttp.ClientSession() as http:
            async with http.get(url + PATH) as without:
                assert without.status == 401
            async with http.get(url + PATH, headers=keys.headers("good")) as shown:
                assert shown.status == 200 and await shown.read() == CONTENT
