"""`first_of` keeps no reference to its tasks after it has returned."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress

from tidegate import clock
from tidegate.link.session import LinkLost, first_of


class Connection:
    """What a stream's work holds on to."""


async def failing(connection: Connection) -> str:
    raise LinkLost("gone")


async def waiting(connection: Connection) -> str:
    await asyncio.get_running_loop().create_future()
    return ""


async def test_an_ended_stream_lets_go_of_its_connection_without_the_garbage_collector() -> None:
    connection = Connection()
    held = weakref.ref(connection)
    gc.disable()
    try:
        with suppress(LinkLost):  # pytest.raises would keep the error, and with it every frame on its way
            await first_of(failing(connection), waiting(connection), names=("read", "write"))
        del connection
        await clock.sleep(0)  # the handle that woke us goes with its turn of the loop

        assert held() is None
    finally:
        gc.enable()
