"""A background task and its owner: it has ended when the owner has, however either of them ends."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask, cancel_and_wait, first_to_end


class Work:
    """Runs for ever, and takes `burial_s` to end; says what it was at."""

    def __init__(self, *, burial_s: float = 0.0) -> None:
        self._burial_s = burial_s
        self.said: list[str] = []

    async def run(self) -> None:
        self.said.append("begun")
        try:
            await clock.sleep(3600.0)
        finally:
            try:
                await clock.sleep(self._burial_s)
            finally:
                self.said.append("ended")


async def at_once() -> None:
    pass


async def with_a_defect() -> None:
    await clock.sleep(1.0)
    raise ZeroDivisionError("of ours")


def named(name: str) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == name]


def crashes(logs: Any) -> list[tuple[str, str, str]]:
    return [(one["event"], one["task"], repr(one["exc_info"])) for one in logs if one["log_level"] == "error"]


@on_virtual_time
async def test_a_task_runs_under_its_name_from_the_entry_of_its_owner_to_its_exit() -> None:
    work = Work(burial_s=2.0)
    owned = OwnedTask(work.run, name="sensors")
    assert named("sensors") == []

    async with owned:
        await settle()
        assert len(named("sensors")) == 1
        assert work.said == ["begun"]

    assert work.said == ["begun", "ended"]
    assert named("sensors") == []


@on_virtual_time
async def test_tasks_on_an_exit_stack_end_in_the_reverse_order_also_when_the_stack_is_left_by_an_error() -> None:
    ended: list[str] = []

    def noting(name: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def run() -> None:
            try:
                await clock.sleep(3600.0)
            finally:
                ended.append(name)

        return run

    with pytest.raises(KeyError):
        async with AsyncExitStack() as stack:
            for name in ("first", "second"):
                await stack.enter_async_context(OwnedTask(noting(name), name=name))
            await settle()
            raise KeyError

    assert ended == ["second", "first"]


@on_virtual_time
async def test_one_that_was_never_started_is_closed_without_further_ado_and_so_is_one_closed_twice() -> None:
    work = Work()
    owned = OwnedTask(work.run, name="sensors")

    await owned.aclose()
    owned.start()
    await settle()
    await owned.aclose()
    await owned.aclose()

    assert work.said == ["begun", "ended"]


@on_virtual_time
async def test_one_that_was_closed_can_be_started_again_and_one_that_runs_cannot() -> None:
    work = Work()
    owned = OwnedTask(work.run, name="sensors")

    for _ in range(2):
        async with owned:
            await settle()
            with pytest.raises(AssertionError, match="'sensors' is started already"):
                owned.start()

    assert work.said == ["begun", "ended"] * 2


@on_virtual_time
async def test_an_owner_may_be_left_after_its_task_has_ended_by_itself() -> None:
    with capture_logs() as logs:
        async with OwnedTask(at_once, name="once"):
            await settle()
            assert named("once") == []

    assert logs == []


@on_virtual_time
async def test_a_defect_is_logged_when_it_happens_and_does_not_disturb_the_owners_end() -> None:
    with capture_logs() as logs:
        async with OwnedTask(with_a_defect, name="prober", crash_means="targets are probed no more"):
            await clock.sleep(2.0)
            told = list(logs)

    assert crashes(told) == [("targets are probed no more", "prober", repr(ZeroDivisionError("of ours")))]
    assert logs == told, "and it is told once"


@on_virtual_time
async def test_a_defect_on_the_way_out_is_logged_as_well() -> None:
    async def breaks_when_cancelled() -> None:
        try:
            await clock.sleep(3600.0)
        finally:
            raise OSError("no room left")

    with capture_logs() as logs:
        async with OwnedTask(breaks_when_cancelled, name="writer"):
            await settle()

    assert crashes(logs) == [("a background task has crashed", "writer", repr(OSError("no room left")))]


@on_virtual_time
async def test_an_end_by_cancellation_is_no_defect() -> None:
    with capture_logs() as logs:
        async with OwnedTask(Work().run, name="sensors"):
            await settle()

    assert logs == []


@on_virtual_time
async def test_an_owner_cancelled_while_it_closes_goes_only_after_its_task() -> None:
    work = Work(burial_s=60.0)
    done: list[str] = []

    async def owner() -> None:
        async with OwnedTask(work.run, name="sensors"):
            await settle()
            done.append("leaves")
        done.append("went on")

    owning = asyncio.create_task(owner())
    await clock.sleep(1.0)  # by now it waits for the burial
    assert done == ["leaves"] and work.said == ["begun"]
    owning.cancel()

    with pytest.raises(asyncio.CancelledError):
        await owning
    assert work.said == ["begun", "ended"], "what the owner would close next is used by nobody"
    assert done == ["leaves"], "the cancellation is not swallowed"


@on_virtual_time
async def test_cancelled_waits_for_all_of_its_tasks_and_raises_what_none_of_them_raises() -> None:
    works = [Work(burial_s=5.0), Work(burial_s=1.0)]
    tasks = [asyncio.create_task(work.run()) for work in works]
    broken = asyncio.create_task(with_a_defect())
    await clock.sleep(2.0)

    await cancel_and_wait(*tasks, broken)
    await cancel_and_wait()

    assert [work.said for work in works] == [["begun", "ended"]] * 2
    assert isinstance(broken.exception(), ZeroDivisionError)


@on_virtual_time
async def test_what_a_cancelled_task_held_is_freed_without_a_garbage_collection() -> None:
    class Held:
        pass

    async def work(held: Held) -> None:
        async with asyncio.timeout(None):  # which knows the task
            await clock.sleep(3600.0)

    held = Held()
    seen, task = weakref.ref(held), asyncio.create_task(work(held))
    del held
    await settle()

    gc.disable()
    try:
        await cancel_and_wait(task)
        assert seen() is None
        with pytest.raises(asyncio.CancelledError):
            task.result()
    finally:
        gc.enable()


@on_virtual_time
async def test_what_the_first_of_several_raises_is_raised_and_the_others_have_ended_by_then() -> None:
    work = Work(burial_s=1.0)

    with pytest.raises(ZeroDivisionError):
        await first_to_end(work.run(), with_a_defect(), name="waits for a defect")

    assert work.said == ["begun", "ended"]
