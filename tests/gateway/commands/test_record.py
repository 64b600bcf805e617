"""`tidegate record` at a running gateway: requests and their outcomes, without ids, texts or tenants."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.app import Gateway
from gateway.commands.record import record
from gateway.core.history.recorder import FlightRecorder, RequestEvent
from gateway.core.history.trace_format import (
    FORMAT,
    VERSION,
    RecordedEnd,
    RecordedHeader,
    RecordedRequest,
    request_line,
)
from gateway.observe.traffic_recorder import RecordingBuffer
from simulator.replay.recording import TrafficRecording, read
from tests.support.gateway.app import BODY, INFER, Far, ask, configured, gateway_for, running, target, until
from tests.support.gateway.fleets import NOW, fleet_of, variant
from tests.support.gateway.flowns import answered, given, request_record, went
from tidegate.generate.usage import Usage
from tidegate.outcome import Overloaded

SECRETS = ("photo-7", "4bf92f3577b34da6a3ce929d0e0e4736", "acme-corp")


async def recorded(gateway: Gateway, path: Path, *words: str) -> Result:
    """What `tidegate record` says; in a thread, since the gateway answers on this loop."""
    return await asyncio.to_thread(
        CliRunner().invoke, record, ["-o", str(path), *words, "--admin", gateway.addresses["admin"]]
    )


async def meanwhile(gateway: Gateway, path: Path, doing: Any, *, most: int) -> tuple[Result, TrafficRecording]:
    """A recording in which something is done, until so many requests have ended."""
    recording = asyncio.create_task(recorded(gateway, path, "--for", "10m", "--most", str(most)))
    await until(lambda: gateway.dispatcher.recorder.recording)
    await doing()
    return await recording, await asyncio.to_thread(read, path)


@pytest.mark.slow
async def test_requests_and_their_outcomes_are_recorded_without_names(tmp_path: Path) -> None:
    edge, pool = Far("edge/attic"), Far("pool/main")
    edge.host.takes_s = 0.01  # at least what it says that the computation took, so that it is believed
    async with running(edge, pool), AsyncExitStack() as stack:
        config = configured(tmp_path, target(edge), target(pool))
        gateway, session = await stack.enter_async_context(gateway_for(config))
        await ask(gateway, session)  # before

        async def doing() -> None:
            headers = {"traceparent": f"00-{SECRETS[1]}-00f067aa0ba902b7-01", "tidegate-tenant": SECRETS[2]}
            await session.post(gateway.addresses["http"] + INFER, json=BODY | {"id": SECRETS[0]}, headers=headers)
            edge.host.error = Overloaded("the queue is full", retry_after_s=0.5)
            await ask(gateway, session)
            await ask(gateway, session, **{"tidegate-pin": "site"})

        result, found = await meanwhile(gateway, tmp_path / "t.tgz", doing, most=3)

        edge.host.error = None
        await until(lambda: not gateway.dispatcher.recorder.recording)

    assert result.exit_code == 0, result.output
    first, second, third = found.requests
    assert (first.outcome, first.served_by, first.model, first.in_time) == ("ok", "edge/attic", "echo", True)
    assert first.budget_s is not None and first.attempts[0].compute_s == pytest.approx(0.005)
    assert [(one.target, one.end) for one in second.attempts] == [("edge/attic", "failed"), ("pool/main", "answered")]
    assert (third.outcome, third.pin, third.served_by) == ("overloaded", "site", "")
    assert all(0.0 <= one.at_s < 600.0 and one.units == 3.0 for one in found.requests)
    assert {one.id for one in found.targets} == {"edge/attic", "pool/main"} == {one.target for one in found.links}
    assert found.targets[0].models[0].variants[0].cost
    assert (found.header.policy, found.header.for_s) == (config.policy, 600.0)
    assert found.seconds >= third.at_s
    with tarfile.open(tmp_path / "t.tgz") as tar:
        everything = b"".join(file.read() for one in tar if (file := tar.extractfile(one)))
    for secret in (*SECRETS, "127.0.0.1"):
        assert secret.encode() not in everything
    assert first.tenant and first.tenant != SECRETS[2]


@pytest.mark.slow
async def test_one_recording_at_a_time_and_only_of_a_duration(tmp_path: Path) -> None:
    pool = Far("pool/main")
    async with running(pool), AsyncExitStack() as stack:
        gateway, _ = await stack.enter_async_context(gateway_for(configured(tmp_path, target(pool))))
        first = asyncio.create_task(recorded(gateway, tmp_path / "a.tgz", "--for", "2s"))
        await until(lambda: gateway.dispatcher.recorder.recording)
        second = await recorded(gateway, tmp_path / "b.tgz", "--for", "2s")
        empty = await first
        endless = await recorded(gateway, tmp_path / "c.tgz", "--for", "9h")
        wrong = await recorded(gateway, tmp_path / "d.tgz", "--for", "soon")

    assert second.exit_code == 1 and "one at a time" in second.output
    assert empty.exit_code == 0 and "nothing to replay" in empty.output, "that nobody asked is an answer"
    assert endless.exit_code == 1 and "up to 3600" in endless.output
    assert wrong.exit_code == 2 and "90s, 5m or 1h" in wrong.output
    assert not (tmp_path / "b.tgz").exists()


@pytest.mark.slow
async def test_a_shed_request_is_recorded_with_its_undone_work(tmp_path: Path) -> None:
    pool = Far("pool/main")
    pool.host.gate.clear()
    async with running(pool), AsyncExitStack() as stack:
        config = configured(tmp_path, target(pool), max_in_flight=1, adaptive_limit=False)
        gateway, session = await stack.enter_async_context(gateway_for(config))

        async def doing() -> None:
            waiting = asyncio.create_task(ask(gateway, session))
            await pool.host.begun.acquire()
            assert (await ask(gateway, session))[0] == 429
            pool.host.gate.set()
            await waiting

        _, found = await meanwhile(gateway, tmp_path / "t.tgz", doing, most=2)

    outcomes = {one.outcome: one for one in found.requests}
    assert set(outcomes) == {"ok", "overloaded"}
    assert outcomes["overloaded"].units == 3.0 and outcomes["overloaded"].attempts == ()


@pytest.mark.parametrize("is_cut", [True, False])
def test_what_came_until_the_stream_broke_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    tape = RecordingBuffer(fleet_of(edge_a=variant()), NOW - 1.0, inf)
    tape.take(request_record())
    header = RecordedHeader(FORMAT, VERSION, "0.2.0", "gateway", "tidegate", 0.0, 600.0)
    said = msgspec.json.encode(header) + b"\n" + tape.read()

    @contextmanager
    def breaking(*_: object, **__: object) -> Iterator[Iterator[bytes]]:
        def lines() -> Iterator[bytes]:
            yield from said.splitlines(keepends=True)
            if is_cut:
                yield b'{"kind":"requ'
            else:
                raise ConnectionResetError("reset by peer")

        yield lines()

    monkeypatch.setattr("gateway.commands.record.stream_admin", breaking)
    file = tmp_path / "b.tgz"
    result = CliRunner().invoke(record, ["-o", str(file), "--for", "10m"])

    assert "the stream ended early (" + ("a line was cut off" if is_cut else "reset by peer") in result.output
    assert len(read(file).requests) == 1 and [one.name for one in tmp_path.iterdir()] == ["b.tgz"]


def test_a_full_disk_is_not_the_end_of_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = RecordedHeader(FORMAT, VERSION, "0.2.0", "gateway", "tidegate", 0.0, 600.0)

    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    @contextmanager
    def streaming(*_: object, **__: object) -> Iterator[Iterator[bytes]]:
        yield iter([msgspec.json.encode(header) + b"\n"])

    monkeypatch.setattr("gateway.commands.record.stream_admin", streaming)
    monkeypatch.setattr("gateway.commands.record.open", lambda *_: Full(), raising=False)
    result = CliRunner().invoke(record, ["-o", str(tmp_path / "a.tgz")])
    assert result.exit_code == 1 and f"-o {tmp_path / 'a.tgz'}" in result.output
    assert "No space left on device" in result.output and "stream ended early" not in result.output
    assert os.listdir(tmp_path) == []


def test_a_recording_goes_where_a_link_leads_and_into_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def silent(*_: object, **__: object) -> Iterator[Iterator[bytes]]:
        yield iter(())

    monkeypatch.setattr("gateway.commands.record.stream_admin", silent)
    (tmp_path / "disk").mkdir()
    link, pipe = tmp_path / "link.tgz", tmp_path / "pipe"
    link.symlink_to("disk/real.tgz")
    os.mkfifo(pipe)  # as a device is, which only root can make

    CliRunner().invoke(record, ["-o", str(link)])
    refused = CliRunner().invoke(record, ["-o", str(pipe)])

    assert link.is_symlink() and tarfile.is_tarfile(tmp_path / "disk" / "real.tgz")
    assert refused.exit_code == 2 and "no regular file" in refused.output
    assert pipe.is_fifo() and sorted(os.listdir(tmp_path)) == ["disk", "link.tgz", "pipe"]


def test_a_file_that_cannot_be_written_is_told_before_an_hour_of_recording(tmp_path: Path) -> None:
    result = CliRunner().invoke(record, ["-o", str(tmp_path / "none" / "a.tgz"), "--for", "1h"])
    assert result.exit_code == 1 and "No such file or directory" in result.output


def test_a_recording_that_is_not_read_loses_lines_and_counts_them() -> None:
    tape = RecordingBuffer(fleet_of(edge_a=variant()), NOW - 1.0, inf, most_bytes=20_000)
    one = request_record()
    for _ in range(200):
        tape.take(one)
    tape.write(RecordedEnd(tape.requests, tape.lost, 1.0))
    held = tape.read()
    assert len(held) <= 20_000 + 200
    assert tape.lost > 0 and tape.lost + held.count(b"\n") - 1 == tape.requests
    assert held.splitlines()[-1].startswith(b'{"kind":"end"')


def test_a_request_that_arrived_before_or_after_the_time_is_not_recorded() -> None:
    tape = RecordingBuffer(fleet_of(edge_a=variant()), NOW, 10.0)
    for shift_s in (-0.001, 10.001):
        tape.take(request_record(shift_s=shift_s))
    assert tape.requests == 0
    tape.take(request_record(shift_s=9.9))
    assert tape.requests == 1


def test_a_hedged_request_is_recorded_with_both_attempts_and_their_own_times() -> None:
    notes = [*went(0, "edge/a", 0.002, acked_s=None, ends=0.263, what="cancelled"), *answered(1, "pool/main", 0.2)]
    line = request_line(
        request_record(notes=notes, end=given("pool/main", 1, hedged=True), elapsed_s=0.263), NOW - 5.0, str.upper
    )
    assert isinstance(line, RecordedRequest)
    silent, answer = line.attempts
    assert (silent.target, silent.end, silent.acked_s, silent.compute_s) == ("edge/a", "cancelled", None, None)
    assert silent.took_s == pytest.approx(0.261)
    assert (answer.reason, answer.queue_s, answer.compute_s, answer.link_s) == ("hedge", 0.02, 0.03, 0.01)
    assert (line.at_s, line.tenant, line.gateway_s) == (5.0, "", 0.002)


def test_a_generation_is_recorded_with_its_tokens_and_the_time_to_the_first() -> None:
    notes = answered(0, "edge/a", 0.002)
    notes.insert(2, RequestEvent(NOW + 0.022, "begun", 0))
    line = request_line(request_record(notes=notes, end=given(usage=Usage("stop", 31, 11, 24))), NOW, str.upper)
    assert (line.prompt_tokens, line.cached_tokens, line.completion_tokens) == (31, 24, 11)
    assert line.attempts[0].first_token_s == pytest.approx(0.020)


def test_a_recorder_without_taps_calls_none() -> None:
    memory, heard = FlightRecorder(2), []
    memory.add(request_record())
    memory.taps.append(heard.append)
    memory.add(request_record(number=2))
    assert [one.number for one in heard] == [2]
