"""The service manager (systemd) hears of its process when it serves, that its event loop turns, and when it drains.

    READY=1      once it serves: what is ordered after it is started then
    WATCHDOG=1   from the event loop, thrice in the time after which a silent process is taken to hang (`WatchdogSec`)
    STOPPING=1   at the first signal

A process whose loop hangs says nothing, so it is killed and started anew: a restart after an end alone would leave it
standing for ever, with its ports open. A process that nobody started so (there is no `NOTIFY_SOCKET`) says nothing. The
variables are taken out of the environment, since the children of this process have nothing to say there.

It can do nothing about a loop that turns and a part that does not: workers have watchdogs of their own.
Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Final, Self

from tidegate import clock
from tidegate.runtime.owned_task import cancel_and_wait

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"
_TIMES: Final = 3.0  # so that one that is late is not taken to hang


class ServiceManager:
    """Args:
    address: of its socket; "": there is none, and nothing is said.
    watchdog_s: the longest silence; None: any is.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @classmethod
    def of(cls, environment: MutableMapping[str, str], pid: int | None) -> Self:
        """The one that started the process of this id, if one did; its variables are taken out of the environment.

        Args:
            pid: None: this process has a parent that speaks for it.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        silence, whose = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        if pid is None:
            return cls()
        is_watched = silence.isdigit() and int(silence) > 0 and whose in ("", str(pid))
        return cls(address, int(silence) / 1e6 if is_watched else None)

    def say(self, word: str) -> None:
        """Say one of the words above. Where nobody hears it, nothing is lost but the word."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(word.encode(), self._address)
        except OSError:
            pass

    def hear(self, event: str) -> None:
        """Tell of an event of this process (`events.py`) what the service manager wants to know of it."""
        if event == "ready":
            self.say(READY)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Inside of it the loop says that it turns."""
        if not self._address or self.watchdog_s is None:
            yield
            return
        task = asyncio.create_task(self._say_alive(self.watchdog_s / _TIMES), name="word to the service manager")
        try:
            yield
        finally:
            await cancel_and_wait(task)

    async def _say_alive(self, every_s: float) -> None:
        while True:
            self.say(ALIVE)
            await clock.sleep(every_s)

    def __repr__(self) -> str:
        silence = "" if self.watchdog_s is None else f", silent for {self.watchdog_s:g} s at most"
        return f"<ServiceManager {self._address or 'none'!r}{silence}>"
