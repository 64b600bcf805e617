"""What a whole gateway does for devices that ask for help: who may ask, for whom, and that nothing goes round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from edge_agent.help.help_lines import HelpLines
from gateway.app import Gateway
from tests.support.certificates import FleetPki
from tests.support.gateway.app import MAX_BYTES, Far, configured, running, target, until
from tests.support.gateway.guarded import keys_in
from tests.support.serving.hosts import echo_request
from tidegate import clock
from tidegate.caller import Grant
from tidegate.link.frames import Greeting
from tidegate.outcome import (
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NothingAlive,
    Overloaded,
    Unauthenticated,
    Unreachable,
)
from tidegate.placement_pin import Pin
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.tls import PlainDialler, Tls
from tidegate.types import HELP, Call, Reply

pytestmark = pytest.mark.slow
ATTIC = "edge/attic"
FOR_ATTIC = {"devices": ({"name": "attic", "tenant": "homes", "highest_priority": 3},)}


@asynccontextmanager
async def helping(folder: Path, *fars: Far, help: dict[str, Any] | None = None, **more: Any) -> AsyncIterator[Gateway]:
    """A gateway over these targets that helps the attic."""
    async with running(*fars):
        keys = {"name": "main", "link_port": 0, "help": help or FOR_ATTIC, **more}
        async with Gateway(configured(folder, *map(target, fars), **keys)) as gateway:
            await gateway.static_targets_tried(30.0)
            yield gateway


@asynccontextmanager
async def asking(
    gateway: Gateway, name: str = ATTIC, *, tls: Tls | None = None, key: str = "", up: bool = True
) -> AsyncIterator[HelpLines]:
    """A device's side. Args: up: wait until the gateway can be asked."""
    named = "gateway/main" if tls else ""
    dialler = PlainDialler() if tls is None else tls.dialler(CertificateIdentity.parse(named))
    lines = HelpLines(
        name,
        lambda: Greeting(name, 1, "test"),
        gateways=lambda: {gateway.addresses["link"]: named},
        dialler_of=lambda _address, _name: dialler,
        key=key,
        draw=lambda: 0.1,
        max_message_bytes=MAX_BYTES,
    )
    async with lines:
        if up:
            await until(lambda: lines.up)
        yield lines


async def asked(lines: HelpLines, *, credential: str = "", budget_s: float = 20.0, **demands: Any) -> Reply:
    now = clock.now()
    call = Call(echo_request(id="r-1"), "oip-http", now, **demands)
    [gateway] = lines.seen("echo", now)
    return await lines.ask(gateway.name, call, now + budget_s, "unfit", credential=credential)


async def why_not(lines: HelpLines, words: str) -> None:
    """Until the device says why it is not helped."""
    await until(lambda: any(words in str(one["why_not"]) for one in lines.told(clock.now())))


async def test_a_device_is_answered_on_its_own_rights_and_every_place_says_so(tmp_path: Path) -> None:
    pool = Far("pool/main")
    async with helping(tmp_path, pool) as gateway, asking(gateway) as lines:
        reply = await asked(lines, priority=1)

        assert reply.route is not None
        assert (reply.route.served_by, reply.route.reason) == ("pool/main", "helped")
        assert reply.helped_by == "gateway/main; because=unfit; chosen=only"
        assert set(reply.stages) == {"admit", "queue", "link", "compute"}
        [call] = pool.host.calls
        assert call.priority == 3  # the highest that this device may have
        record = next(reversed(gateway.dispatcher.recorder))
        assert (record.asker, record.protocol, record.tenant) == (ATTIC, HELP, "homes")
        assert reply.request_id.endswith(f"-{record.number}")
        assert lines.manifest("echo") is not None
        assert lines.manifest("nothing") is None
        with pytest.raises(Forbidden, match="may not act for 'acme'"):
            await asked(lines, tenant="acme")
        assert len(pool.host.calls) == 1


async def test_a_request_never_comes_back_to_the_device_that_asks(tmp_path: Path) -> None:
    attic = Far(ATTIC)
    any_device = {"devices": ({"name": "*", "tenant": "homes"},)}
    async with helping(tmp_path, attic, help=any_device) as gateway:
        async with asking(gateway) as lines:
            with pytest.raises(NothingAlive):
                await asked(lines)
            assert not attic.host.calls
        async with asking(gateway, "edge/cellar") as lines:
            reply = await asked(lines)
            assert reply.route is not None
            assert reply.route.served_by == ATTIC


@pytest.mark.parametrize("pin", ["edge", "site"])
async def test_a_pinned_request_is_refused_here_too(tmp_path: Path, pin: Pin) -> None:
    pool = Far("pool/main")
    async with helping(tmp_path, pool) as gateway, asking(gateway) as lines:
        with pytest.raises(InvalidRequest, match="does not leave edge/attic"):
            await asked(lines, pin=pin)
        assert not pool.host.calls


async def test_a_caller_who_leaves_frees_its_place_at_the_gateway_and_at_the_target(tmp_path: Path) -> None:
    pool = Far("pool/main")
    async with helping(tmp_path, pool) as gateway, asking(gateway) as lines:
        pool.host.gate.clear()
        caller = asyncio.create_task(asked(lines))
        await pool.host.begun.acquire()
        assert (gateway.admission.in_flight, lines.counts.in_flight) == (1, 1)

        caller.cancel()
        with suppress(asyncio.CancelledError):
            await caller

        await until(lambda: pool.host.cancelled == 1)
        await until(lambda: gateway.admission.in_flight == 0)
        assert lines.counts.in_flight == 0
        assert lines.counts.requests["unfit", "cancelled"] == 1


async def test_a_gateway_that_answers_nothing_costs_a_budget_and_after_three_is_asked_no_more(tmp_path: Path) -> None:
    pool = Far("pool/main")
    async with helping(tmp_path, pool) as gateway, asking(gateway) as lines:
        pool.host.gate.clear()
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await asked(lines, budget_s=0.05)  # too short to say anything of the gateway
        assert lines.seen("echo", clock.now())[0].why_not == ""
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await asked(lines, budget_s=0.3)
        assert "had no answer" in lines.seen("echo", clock.now())[0].why_not


async def test_a_device_is_the_one_that_its_certificate_names(tmp_path: Path) -> None:
    pki = FleetPki(tmp_path)
    tls = pki.config("gateway/main").model_dump(exclude_none=True)
    two = {"devices": ({"name": "attic", "tenant": "homes"}, {"name": "cellar", "tenant": "homes"})}
    async with helping(tmp_path, help=two, tls=tls) as gateway:
        async with asking(gateway, "edge/cellar", tls=pki.tls(ATTIC), up=False) as lines:
            await why_not(lines, "it says that it is edge/cellar and shows the credential of edge/attic")
        async with asking(gateway, tls=pki.tls(ATTIC)) as lines:
            assert gateway.help is not None
            assert gateway.help.askers == {ATTIC: 0}


async def test_whom_no_entry_names_is_not_helped_and_its_newer_stream_takes_the_place_of_the_older(
    tmp_path: Path,
) -> None:
    async with helping(tmp_path) as gateway:
        async with asking(gateway, "edge/stranger", up=False) as lines:
            await why_not(lines, "no entry of `help.devices` at this gateway is for edge/stranger")
            with pytest.raises(Unreachable):
                await asked(lines)
        async with asking(gateway, "pool/main", up=False) as lines:
            await why_not(lines, "only devices ask for help here")
        async with asking(gateway) as older, asking(gateway):
            await until(lambda: not older.up)
            assert gateway.help is not None
            assert list(gateway.help.askers) == [ATTIC]


async def test_a_gateway_without_the_section_says_that_it_helps_no_devices(tmp_path: Path) -> None:
    async with Gateway(configured(tmp_path, link_port=0)) as gateway, asking(gateway, up=False) as lines:
        await why_not(lines, "it helps no devices")
    with pytest.raises(ValidationError, match="help needs link_port"):
        configured(tmp_path / "other", help=FOR_ATTIC)


async def test_the_key_of_a_caller_counts_within_what_the_device_may_have(tmp_path: Path) -> None:
    keys, pool = keys_in(tmp_path), Far("pool/main")
    keys.add("attic", Grant("attic", rights=("dial-in",)))
    acme = {"acme": {"requests_per_s": 1000.0}}
    async with (
        helping(tmp_path, pool, auth={"keys_file": keys.path}, tenants=acme) as gateway,
        asking(gateway, key=keys.texts["attic"]) as lines,
    ):
        await asked(lines, credential=f"Bearer {keys.texts['good']}", priority=1)
        record = next(reversed(gateway.dispatcher.recorder))
        assert (record.tenant, record.asker) == ("acme", ATTIC)
        assert pool.host.calls[-1].priority == 3
        assert keys.texts["good"] not in repr(pool.host.calls)

        with pytest.raises(Forbidden):
            await asked(lines, credential=f"Bearer {keys.texts['narrow']}")
        for credential in (f"Bearer {keys.texts['revoked']}", "Bearer tg_nonsense", "Basic dXNlcjpwYXNz"):
            with pytest.raises(Unauthenticated):
                await asked(lines, credential=credential)
        with pytest.raises(InvalidRequest, match="a credential of"):
            await asked(lines, credential="Bearer " + "x" * 20_000)
        assert len(pool.host.calls) == 1


async def test_a_device_is_held_to_its_models_and_its_rate(tmp_path: Path) -> None:
    pool = Far("pool/main")
    narrow = {"devices": ({"name": "attic", "tenant": "homes", "models": ("other-*",)},)}
    async with helping(tmp_path / "a", pool, help=narrow) as gateway, asking(gateway) as lines:
        with pytest.raises(Forbidden, match="may not use a model"):
            await asked(lines)
        assert lines.manifest("echo") is None
    slow = {"devices": ({"name": "attic", "tenant": "homes", "requests_per_s": 0.01},)}
    async with helping(tmp_path / "b", Far("pool/main"), help=slow) as gateway, asking(gateway) as lines:
        with pytest.raises(Overloaded):
            for _ in range(20):
                await asked(lines)
        assert "no room" in lines.seen("echo", clock.now())[0].why_not
