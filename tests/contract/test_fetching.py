"""A device's fetcher at a gateway's port of artefacts: over TLS, from where a kill left it, and at a busy door."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.core.fetch_retry import DownloadBudget
from edge_agent.delivery.fetching import ArtefactFetcher, session
from edge_agent.delivery.model_store import ModelStore
from gateway.delivery.artifacts.access import credential_check, secured_for_devices
from gateway.delivery.artifacts.server import ArtifactServer
from gateway.delivery.artifacts.store import ArtifactStore
from tests.support.certificates import FleetPki
from tests.support.edge.rollouts import Made, made
from tidegate.rollout.plan import Net
from tidegate.servers.http_server import open_http_server


def shelf(root: Path, one: Made) -> ArtifactStore:
    store = ArtifactStore(root)
    for digest, content in one.contents.items():
        store.append(digest, 0, content)
        store.finish(digest)
    return store


@pytest.mark.slow
async def test_a_device_fetches_over_tls_with_its_own_certificate_and_no_byte_twice(tmp_path: Path) -> None:
    pki, one = FleetPki(tmp_path / "pki"), made("2", padding_bytes=1_000_000)
    plan = one.plan()
    secured = secured_for_devices(pki.tls("gateway/main"))
    door = ArtifactServer(shelf(tmp_path / "shelf", one), admit=credential_check(None, secured))
    port = open_http_server(
        door.routes(), "127.0.0.1", 0, key="artifacts.port", max_body_bytes=1, grace_s=0.1, secured=secured
    )
    store = ModelStore(tmp_path / "device")
    store.prepare()
    large = max(plan.artefacts, key=lambda artefact: artefact.size_bytes)
    half = large.chunk_bytes * (len(large.chunks) // 2)  # what an agent that was killed has of it
    store.partial(large.sha256).write_bytes(one.contents[large.sha256][:half])
    async with port as url, session(tls=pki.tls("edge/kiosk-1").client_context()) as http:
        fetcher = ArtefactFetcher(http, store, hindrance=lambda: "", draw=lambda: 0.0)
        await fetcher.fetch(plan, [url], DownloadBudget(Net(), plan.max_bytes, 1))

    assert all(store.has(artefact) for artefact in plan.artefacts)
    assert door.served_bytes == plan.size_bytes - half


def test_a_server_that_says_when_to_come_back_is_no_reason_to_give_up() -> None:
    patience = DownloadBudget(Net(max_attempts=2), 1000, 1)

    assert [patience.record_status(503, asked_back=True) for _ in range(50)] == [""] * 50
    assert patience.record_status(503) == ""
    assert patience.record_status(503) == "http_503: no progress in 2 attempts"
