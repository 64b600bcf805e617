"""Several processes that answer one scrape: real processes, which come, go and are killed."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.metrics import sharing as sharing_file
from tidegate.metrics.exposition import Exposition
from tidegate.metrics.families import counter, gauge, histogram
from tidegate.metrics.histogram import Exemplar, Histogram
from tidegate.metrics.sharing import EVERY_S, SharedMetrics

# One gateway in miniature: counts up by what it is told on stdin, and answers each line with a scrape.
CHILD = """
import asyncio, sys
from pathlib import Path
from tests.tidegate.metrics.test_sharing import Counted
from tidegate.metrics.exposition import Exposition
from tidegate.metrics.sharing import SharedMetrics

async def main():
    counted, sharing = Counted(), SharedMetrics(Path(sys.argv[1]))
    exposition = Exposition(counted.families, sharing)
    sharing.own = exposition.own
    async with sharing:
        while line := await asyncio.to_thread(sys.stdin.readline):
            counted.serve(int(line))
            sys.stdout.write(exposition.render("application/openmetrics-text")[0].decode())
            sys.stdout.flush()

asyncio.run(main())
"""


class Counted:
    """What one process counts."""

    def __init__(self) -> None:
        self.served = 0
        self.took = Histogram((0.1, 1.0))

    def serve(self, requests: int) -> None:
        self.served += requests
        for _ in range(requests):
            self.took.observe(0.5)

    def families(self) -> Iterator[Metric]:
        yield counter("served", "Requests.", ("model",), [(("minilm",), float(self.served))])
        yield histogram("took_seconds", "Times.", (), [((), self.took)])
        yield gauge("inside", "Requests inside.", (), [((), float(self.served))])


class Child:
    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> str:
        return str(self._process.pid)

    def is_named(self, name: str) -> bool:
        return name.partition("-")[0] == self.pid

    def serve(self, requests: int) -> dict[tuple[str, ...], float]:
        """Have it serve so many more; what it then answers to a scrape."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{requests}\n")
        stdin.flush()
        lines = []
        while not lines or lines[-1] != "# EOF\n":
            lines.append(stdout.readline())
            assert lines[-1], "it has ended"
        return read("".join(lines))

    def end(self, *, killed: bool = False) -> None:
        if killed:
            self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=60)


def read(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values…) → value."""
    return {
        (one.name, *(value for _, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


@contextmanager
def children(folder: Path, count: int) -> Iterator[list[Child]]:
    started = [Child(folder) for _ in range(count)]
    try:
        yield started
    finally:
        for one in started:
            one.end()


def inside(seen: dict[tuple[str, ...], float], child: Child) -> list[float]:
    """The gauge of one process."""
    return [value for (name, *labels), value in seen.items() if name == "inside" and child.is_named(labels[0])]


SERVED = ("served_total", "minilm")


@pytest.mark.slow
def test_a_scrape_of_any_process_answers_for_all(tmp_path: Path) -> None:
    with children(tmp_path, 3) as (one, two, three):
        for child, requests in ((one, 10), (two, 200), (three, 3000)):
            child.serve(requests)
        for child in (one, two, three):
            seen = child.serve(0)
            assert seen[SERVED] == 3210
            assert seen["took_seconds_bucket", "1.0"] == 3210
            assert seen["took_seconds_sum",] == pytest.approx(1605.0)
            assert inside(seen, two) == [200], "gauges are not added up"
            assert inside(seen, three) == [3000]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_counts_outlive_their_process_and_gauges_do_not(tmp_path: Path, killed: bool) -> None:
    with children(tmp_path, 1) as (one,):
        gone = Child(tmp_path)
        gone.serve(100)
        one.serve(1)
        gone.end(killed=killed)
        for _ in range(3):  # whatever was folded once is not folded again
            seen = one.serve(1)
        assert seen[SERVED] == 104
        assert not inside(seen, gone)
        assert not list(tmp_path.glob(f"{gone.pid}-*")), "nothing of it is left but its counts"
        with children(tmp_path, 1) as (later,):
            assert later.serve(0)[SERVED] == 104


@pytest.mark.slow
def test_no_scrape_counts_less_than_the_one_before_from_any_process(tmp_path: Path) -> None:
    with children(tmp_path, 2) as pair:
        before = 0.0
        for turn in range(20):
            now = pair[turn % 2].serve(turn)[SERVED]
            assert now >= before + turn
            before = now


def sharing(folder: Path, counted: Counted, name: str = "") -> SharedMetrics:
    one = SharedMetrics(folder, name=name)
    one.own = counted.families
    return one


def total(families: Iterator[Metric], name: str = "served_total") -> float:
    return sum(one.value for family in families for one in family.samples if one.name == name)


@on_virtual_time
async def test_others_are_seen_as_they_were_at_most_a_second_ago(tmp_path: Path) -> None:
    busy, asked = Counted(), Counted()
    async with sharing(tmp_path, busy, "a"), sharing(tmp_path, asked, "b") as other:
        await clock.sleep(0.1)
        busy.serve(5)
        assert total(other.merged(list(asked.families()))) == 0
        await clock.sleep(EVERY_S)
        assert total(other.merged(list(asked.families()))) == 5


@on_virtual_time
async def test_what_was_folded_counts_once_even_if_its_files_were_left(tmp_path: Path) -> None:
    gone, asked = Counted(), Counted()
    gone.serve(7)
    async with sharing(tmp_path, gone, "a"):
        pass
    left = (tmp_path / "a.json").read_bytes()
    async with sharing(tmp_path, asked, "b") as one:
        assert total(one.merged(list(asked.families()))) == 7
        (tmp_path / "a.json").write_bytes(left)  # as if whoever folded it had been killed before removing it
        assert total(one.merged(list(asked.families()))) == 7
        assert not (tmp_path / "a.json").exists()


@on_virtual_time
async def test_processes_with_one_pid_count_apart_and_after_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers, each of which has a process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    one, two, after = Counted(), Counted(), Counted()
    async with asyncio.timeout(60.0), sharing(tmp_path, one) as asked:
        one.serve(5)
        async with sharing(tmp_path, two):
            two.serve(20)
            await clock.sleep(EVERY_S)
            assert total(asked.merged(list(one.families()))) == 25
        async with sharing(tmp_path, after) as restarted:
            after.serve(100)
            for _ in range(2):
                assert total(restarted.merged(list(after.families()))) == 125
        assert total(asked.merged(list(one.families()))) == 125


@on_virtual_time
async def test_a_process_that_stopped_in_the_middle_of_a_fold_holds_nobody_up(tmp_path: Path) -> None:
    gone, living, asked = Counted(), Counted(), Counted()
    gone.serve(5)
    living.serve(20)
    async with sharing(tmp_path, gone, "a"):
        pass
    async with sharing(tmp_path, living, "b"), sharing(tmp_path, asked, "c") as other:
        with folding(tmp_path):
            async with sharing(tmp_path, Counted(), "d"):
                await clock.sleep(EVERY_S)
                families = list(other.merged(list(asked.families())))
                assert total(iter(families)) == 25
                assert total(iter(families), "inside") == 20, "of living ones only"
        for _ in range(2):
            assert total(other.merged(list(asked.families()))) == 25
        assert not (tmp_path / "a.json").exists()


@on_virtual_time
async def test_what_is_folded_while_it_is_read_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes = Path.read_bytes

    def gone(name: str) -> SharedMetrics:
        counted = Counted()
        counted.serve(5)
        return sharing(tmp_path, counted, name)

    async with sharing(tmp_path, Counted(), "c") as asked, sharing(tmp_path, Counted(), "d") as other:
        async with gone("a"):
            pass
        assert total(asked.merged([])) == 5
        async with gone("b"):
            pass
        with folding(tmp_path) as lock:

            def read_late(path: Path) -> bytes:
                found = read_bytes(path)
                monkeypatch.setattr(Path, "read_bytes", read_bytes)
                os.close(lock.pop())
                list(other.merged([]))  # folds, after the other one has read what was folded before
                return found

            monkeypatch.setattr(Path, "read_bytes", read_late)
            assert total(asked.merged([])) == 10
        assert not lock


@on_virtual_time
async def test_a_process_that_ended_before_it_wrote_leaves_nothing_for_good(tmp_path: Path) -> None:
    (tmp_path / "7-ab.life").touch()
    async with sharing(tmp_path, Counted(), "a"), sharing(tmp_path, Counted(), "b") as one:
        list(one.merged([]))
        assert sorted(name for name in os.listdir(tmp_path) if name.endswith(".life")) == ["a.life", "b.life"]


@contextmanager
def folding(folder: Path) -> Iterator[list[int]]:
    """Another process folds meanwhile, as far as its lock tells; which is given back early by closing what is held."""
    held = [os.open(folder / "folding.lock", os.O_RDWR | os.O_CREAT)]
    fcntl.flock(held[0], fcntl.LOCK_EX)
    try:
        yield held
    finally:
        for one in held:
            os.close(one)


@on_virtual_time
@pytest.mark.parametrize("spoil", [b"", b"{", b'{"families": 3}', b"\xff"])
async def test_a_snapshot_that_cannot_be_read_is_passed_over(tmp_path: Path, spoil: bytes) -> None:
    counted = Counted()
    counted.serve(2)
    async with sharing(tmp_path, Counted(), "a"), sharing(tmp_path, counted, "b") as one:
        (tmp_path / "a.json").write_bytes(spoil)
        assert total(one.merged(list(counted.families()))) == 2


@on_virtual_time
async def test_a_folder_that_is_gone_leaves_each_to_itself(tmp_path: Path) -> None:
    counted = Counted()
    counted.serve(2)
    folder = tmp_path / "shared"
    async with sharing(folder, counted, "a") as one:
        remove_all(folder)
        assert total(one.merged(list(counted.families()))) == 2


def remove_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    os.rmdir(folder)


@on_virtual_time
async def test_exemplars_survive_the_merge(tmp_path: Path) -> None:
    one, two = Counted(), Counted()
    for counted, utc_s in ((one, 100.0), (two, 200.0)):
        counted.serve(1)
        counted.took.exemplify(Exemplar(0.5, f"trace-{utc_s:g}", utc_s))
    async with sharing(tmp_path, one, "a"):
        await clock.sleep(0.1)
        async with sharing(tmp_path, two, "b") as asked:
            body = Exposition(two.families, asked).render("application/openmetrics-text")[0].decode()
    assert 'took_seconds_bucket{le="1.0"} 2.0 # {trace_id="trace-200"} 0.5 200.0' in body, "the newest"


@pytest.mark.parametrize(
    ("accept", "begins", "ends"),
    [
        ("", b"text/plain", b""),
        ("text/plain;version=0.0.4", b"text/plain", b""),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", b"application/openmetrics-text", b"# EOF\n"),
        ("application/openmetrics-text;version=x.y;escaping=\x00", b"application/openmetrics-text", b"# EOF\n"),
    ],
)
def test_the_format_is_the_one_that_was_asked_for(accept: str, begins: bytes, ends: bytes) -> None:
    body, kind = Exposition(Counted().families).render(accept)
    assert kind.encode().startswith(begins)
    assert body.endswith(ends)


@on_virtual_time
async def test_a_full_disk_at_the_start_leaves_a_process_to_itself_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    busy, asked = Counted(), Counted()
    busy.serve(5)
    async with sharing(tmp_path, busy, "a"):
        with monkeypatch.context() as patch:
            patch.setattr(sharing_file, "_locked", full)
            other = await sharing(tmp_path, asked, "b").__aenter__()
            asked.serve(2)
            assert total(other.merged(list(asked.families()))) == 2
            await clock.sleep(EVERY_S / 2)
        await clock.sleep(EVERY_S)
        assert total(other.merged(list(asked.families()))) == 7
        await other.__aexit__()


@on_virtual_time
async def test_that_nothing_can_be_written_is_said_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_files(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, capture_logs() as logged:
        async with sharing(tmp_path, Counted(), "a"):
            patch.setattr(sharing_file, "_put", no_files)
            await clock.sleep(150.0)
            patch.undo()
    assert [one["event"] for one in logged] == ["metrics are not left for others"] * 3
