"""The door for Prometheus, and what comes out of it."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloud_pool.metrics import PoolMetrics
from tests.cloud_pool.workers.test_health_controller import watched
from tests.support.loop import on_virtual_time
from tidegate.metrics.exposition import Exposition
from tidegate.metrics.scrape_port import MOST_BYTES, ScrapeServer


async def said(door: ScrapeServer, request: bytes) -> bytes:
    host, _, port = door.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    if not request:
        writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_scrape_is_answered_as_http() -> None:
    async with ScrapeServer(lambda _accept: (b"up 1\n", "text/plain"), "127.0.0.1", 0) as door:
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{door.address}/metrics").read())
        assert body == b"up 1\n"
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            await asyncio.to_thread(urllib.request.urlopen, f"http://{door.address}/")
        refused.value.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics?name=x HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nSec-Fetch-Site: none\r\n\r\n", b"200 OK"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nOrigin: https://evil.example\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nsec-fetch-site: cross-site\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nSec-Fetch-Site: same-origin\r\n\r\n", b"403"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"\x16\x03\x01" + b"x" * (2 * MOST_BYTES), b"400"),
        (b"", b"400"),
        (b"\r\n\r\n", b"405"),
    ],
)
async def test_whatever_comes_is_answered_and_closed(request_bytes: bytes, status: bytes) -> None:
    async with ScrapeServer(lambda _accept: (b"up 1\n", "text/plain"), "127.0.0.1", 0) as door:
        try:
            assert (await said(door, request_bytes)).startswith(b"HTTP/1.1 " + status)
        except ConnectionResetError:
            assert len(request_bytes) > MOST_BYTES, "what nobody read may reset the connection"
        assert b"up 1" in await said(door, b"GET /metrics HTTP/1.0\r\n\r\n")


@on_virtual_time
async def test_what_is_printed_parses_and_says_what_happened() -> None:
    async with watched(places=2, after_requests=10) as watch:
        await watch.looks(12)
        metrics = PoolMetrics(
            watch.pool.scheduler,
            watch.pool.supervisor,
            watch.steward,
            lambda: [lane.statistics for lane in watch.pool.supervisor.lanes.values()],
        )
        text = Exposition(metrics.collect).render()[0].decode()
        found = {sample.name: sample for one in text_string_to_metric_families(text) for sample in one.samples}
        assert found["tidegate_pool_recycles_total"].labels == {"reason": "served"}
        assert found["tidegate_pool_recycles_total"].value >= 1
        assert found["nv_inference_exec_count"].value == 24
        assert found["tidegate_pool_worker_up"].value == 1
        assert found["tidegate_pool_batch_cap_ratio"].value == 1
        assert found["tidegate_pool_memory_held_bytes"].labels == {"device": "cpu"}
        assert found["tidegate_pool_memory_reserved_bytes"].value == 0
        assert found["tidegate_pool_share_owed_seconds"].value == 0
        assert "PoolMetrics" in repr(metrics)
