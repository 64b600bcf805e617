"""Real brokers for tests, each a process on a port of its own, and a scripted one for what no real broker does.

`Mosquitto` is the truth about MQTT; `Embedded` is what `tidegate up` starts. Both can be killed and started again on
the same port, with nothing retained, as after a crash. `ScriptedBroker` answers a CONNECT as it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tidegate import clock
from tidegate.testing.ports import free_port

MOSQUITTO = shutil.which(
    "mosquitto", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
)
START_WITHIN_S = 60.0
T = TypeVar("T")


class BrokerProcess:
    """A broker that can be started, killed and started again on its port.

    What it says goes into a file: a pipe that nobody reads is full after some three hundred connections, each of which
    Mosquitto tells of, and then it serves nobody any more.
    """

    versions: tuple[str, ...]

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def said(self) -> str:
        """All that the newest process said."""
        return self._log.read_text(errors="replace")

    @property
    def _log(self) -> Path:
        return self._folder / f"broker-{self.port}.log"

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self, line: str) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Returns once the broker has said that it serves."""
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        began_at = clock.now()
        while not any(self.is_ready(line) for line in self.said.splitlines()):
            if self._process.poll() is not None or clock.now() > began_at + START_WITHIN_S:
                raise RuntimeError(f"{type(self).__name__} did not start: {self.said}")
            time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._reap()

    def stop(self) -> tuple[int, str]:
        """End it as a supervisor would; its exit code and all it has said."""
        assert self._process is not None
        self._process.terminate()
        return self._reap()

    def _reap(self) -> tuple[int, str]:
        process, self._process = self._process, None
        assert process is not None
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        return process.returncode, self.said

    def __enter__(self: T) -> T:
        self.start()  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()


class Mosquitto(BrokerProcess):
    versions = ("5", "3.1.1")

    def command(self) -> list[str]:
        assert MOSQUITTO is not None
        config = self._folder / f"mosquitto-{self.port}.conf"
        config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\npersistence false\nset_tcp_nodelay true\n"
        )
        return [MOSQUITTO, "-c", str(config)]

    def is_ready(self, line: str) -> bool:
        return line.rstrip().endswith("running")


class Embedded(BrokerProcess):
    versions = ("3.1.1",)

    def command(self) -> list[str]:
        pid = str(os.getpid())
        return [
            sys.executable,
            "-m",
            "tidegate.tools.broker.embedded",
            "--port",
            str(self.port),
            "--die-with-parent",
            pid,
        ]

    def is_ready(self, line: str) -> bool:
        return line.startswith('{"event":"ready"')


@dataclass
class Signal:
    """A callback that a test can wait on: `until` looks again whenever it was called."""

    _called: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self) -> None:
        self._called.set()

    async def until(self, look: Callable[[], T], within_s: float = 60.0) -> T:
        """What `look` returns once that is true. Fails the test after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    self._called.clear()
                    seen = look()
                    if seen:
                        return seen
                    await self._called.wait()
        except TimeoutError:
            raise AssertionError(f"not within {within_s:g} s; the last look saw {look()!r}") from None


@dataclass
class ScriptedBroker:
    """Says `connack` to a CONNECT, `suback` to a SUBSCRIBE, and nothing to anything else; b"" stays silent."""

    connack: bytes = b"\x20\x02\x00\x00"
    suback_code: int | None = 1
    silent_s: float = 0.0  # before the CONNACK
    hang_up: bool = False  # after the CONNACK
    connects: list[float] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}?protocol=3.1.1"

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[ScriptedBroker]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for kind, body in _packets(reader):
                if kind == 0x10:
                    self.connects.append(clock.now())
                    await clock.sleep(self.silent_s)
                    writer.write(self.connack)
                elif kind == 0x80 and self.suback_code is not None:
                    writer.write(b"\x90\x03" + body[:2] + bytes((self.suback_code,)))
                if self.hang_up:
                    break
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def _packets(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    with contextlib.suppress(EOFError):
        while True:
            kind = (await reader.readexactly(1))[0] & 0xF0
            length = shift = 0
            while True:
                byte = (await reader.readexactly(1))[0]
                length |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            yield kind, await reader.readexactly(length)


@contextlib.contextmanager
def running(kind: type[BrokerProcess], folder: Path) -> Iterator[BrokerProcess]:
    broker = kind(folder)
    with broker:
        yield broker
