"""The embedded broker: amqtt in a process of its own, so that a first try needs nothing installed.

    python -m tidegate.tools.broker.embedded --host 127.0.0.1 --port 1883 --die-with-parent PID

It speaks MQTT 3.1.1, keeps retained messages in memory and lets any client in, which it logs at its start; that is why
it listens on loopback and nowhere else. Production runs Mosquitto or another broker: every guarantee that Tidegate
gives about fleet state holds on either, by the same contract tests.

It is a process and not a task of the gateway, so that a gateway's restart does not lose the retained births, and a
flood at the broker does not delay a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import click
import structlog
from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker

from tidegate import clock
from tidegate.runtime import events
from tidegate.runtime.lifeline import die_with_parent
from tidegate.servers.address import format_address

MAX_CONNECTIONS: Final = 1024
CONNECT_TIMEOUT_S: Final = 5.0
SHUTDOWN_TIMEOUT_S: Final = 1.0
HAND_ON_TIMEOUT_S: Final = 5.0
_LISTENER: Final = "default"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

CONNACK_5_UNSUPPORTED: Final = bytes((0x20, 3, 0, 0x84, 0))
DISCONNECT: Final = (b"\xe0", b"\x00")

log = structlog.get_logger(__name__)


class EmbeddedBroker(Broker):  # type: ignore[misc]  # amqtt is not typed
    """amqtt with corrections: it refuses MQTT 5, closes superseded connections, and keeps wills and messages right.

    Connections reach amqtt through its public interface for listeners of others (`external_connected`), so that
    their first bytes can be looked at before. The corrections have none: they override the private methods of amqtt
    that are named below, which is why `pyproject.toml` pins amqtt to one minor version. This class and
    `_Subscriptions` are all that depends on them.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "listeners": {_LISTENER: {"type": "external", "bind": "external"}},
                "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
            }
        )
        self._subscriptions = _Subscriptions()
        self._stopping = False
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._connections: dict[str, _ClosableWriter] = {}  # the newest of each client id

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end, or refuse its MQTT 5.

        amqtt reads an MQTT 5 CONNECT as if it were 3.1.1: properties and will shift what follows, so it waits for bytes
        that never come and the client waits with it. Here a 5 is refused as version 5 specifies, whereupon `MqttLink`
        tries 3.1.1 at once; a peer that sends nothing (a port scan) is closed without a log line.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                head = await _read_head(reader)
            if _speaks_5(head):
                writer.write(CONNACK_5_UNSUPPORTED)
                await writer.drain()
            else:
                async with self._room:
                    await self.external_connected(_ReplayReader(head, reader), _ClosableWriter(writer), _LISTENER)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            # A client that vanished, or our own end: streams' done-callback would print a traceback for each.
            pass
        finally:
            writer.close()

    async def shutdown(self) -> None:
        self._stopping = True
        await super().shutdown()

    # Overrides of private methods of amqtt 0.12, each with the defect that it corrects.

    async def _publish_retained_messages_for_subscription(self, subscription: tuple[str, int], session: Any) -> None:
        # amqtt sends a new connection what is retained for the subscriptions of others too, and breaks that connection
        # when one of these ends meanwhile.
        subscribed = self._subscriptions.get(subscription[0], ())
        if any(other.client_id == session.client_id for other, _ in subscribed):
            await super()._publish_retained_messages_for_subscription(subscription, session)

    async def _handle_client_session(
        self, reader: Any, writer: Any, client_session: Any, handler: Any, server: Any, listener_name: str
    ) -> None:
        # Of two connections that begin under one id at once, amqtt serves one and keeps the other open without an
        # answer; one that it has superseded it may keep open as well. The protocol says that the older one is closed.
        name = client_session.client_id
        before, self._connections[name] = self._connections.get(name), writer
        if before is not None:
            before.hang_up()
        try:
            await super()._handle_client_session(reader, writer, client_session, handler, server, listener_name)
        finally:
            if self._connections.get(name) is writer:
                del self._connections[name]

    async def _client_message_loop(self, client_session: Any, handler: Any) -> None:
        # A connection that ends takes along the messages that amqtt acknowledged to it and has not handed on yet.
        handler.wait_disconnect = partial(_once_handed_on, handler.wait_disconnect, client_session)
        await super()._client_message_loop(client_session, handler)

    async def _delete_session(self, client_id: str) -> None:
        # When a client comes back under its own id, amqtt forgets the old connection without closing it, so that its
        # will is never sent; the protocol says that it is closed.
        _, superseded = self.sessions.get(client_id, (None, None))
        await super()._delete_session(client_id)
        if superseded is not None:
            await superseded.handle_connection_closed()

    async def _cleanup_session(self, client_id: str) -> None:
        # amqtt collects ended sessions once a second and removes them one by one; by then, some have come back.
        session, _ = self.sessions.get(client_id, (None, None))
        if self._stopping or session is None or session.transitions.state == "disconnected":
            await super()._cleanup_session(client_id)

    async def _handle_disconnect(
        self, client_session: Any, handler: Any, disconnect_waiter: asyncio.Future[Any]
    ) -> None:
        # At the end of a connection amqtt cancels what it has read and not handled yet, a DISCONNECT too, and then
        # sends the will; after a DISCONNECT there is none to send (MQTT-3.14.4-3).
        if isinstance(handler.reader, _ReplayReader) and handler.reader.ended_with_disconnect:
            client_session.will_flag = False
        await super()._handle_disconnect(client_session, handler, disconnect_waiter)


class _Subscriptions(dict[str, Any]):
    """The subscriptions by filter, which amqtt iterates over with waits between, while sessions begin and end."""

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(super().__iter__()))


async def _once_handed_on(wait_disconnect: Callable[[], Awaitable[Any]], session: Any) -> Any:
    """Return how the session ended, once the messages that were acknowledged to it have been handed on."""
    ending = await wait_disconnect()
    with contextlib.suppress(TimeoutError):  # a client that goes on sending after its DISCONNECT
        async with asyncio.timeout(HAND_ON_TIMEOUT_S):
            while not session.delivered_message_queue.empty():  # amqtt's queue has no event for it
                await clock.sleep(0)
    return ending


class _ClosableWriter(StreamWriterAdapter):  # type: ignore[misc]
    """A writer whose connection can be closed at once, without a wait for the peer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        super().__init__(writer)
        self._connection = writer

    def hang_up(self) -> None:
        self._connection.close()


class _ReplayReader(StreamReaderAdapter):  # type: ignore[misc]
    """A reader that begins with bytes which were already read, and knows whether the last packet was a DISCONNECT."""

    def __init__(self, head: bytes, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._head = head
        self._last_two = (b"", b"")

    @property
    def ended_with_disconnect(self) -> bool:
        """Whether the last packet was a DISCONNECT: amqtt reads a fixed header byte by byte."""
        return self._last_two == DISCONNECT

    async def read(self, n: int = -1) -> bytes:
        chunk = await self._read(n)
        self._last_two = (self._last_two[1], chunk)
        return chunk

    async def _read(self, n: int) -> bytes:
        wanted = n if n >= 0 else len(self._head)
        head, self._head = self._head[:wanted], self._head[wanted:]
        if len(head) == n:
            return head
        return head + bytes(await super().read(n - len(head) if n >= 0 else n))


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """The fixed header, then name and level of the protocol, if this is a CONNECT of our time."""
    head = await reader.readexactly(2)
    while head[-1] & 0x80 and len(head) < 5:
        head += await reader.readexactly(1)
    return head + await reader.readexactly(7)


def _speaks_5(head: bytes) -> bool:
    return head[0] == 0x10 and head[-7:] == b"\x00\x04MQTT\x05"


async def serve(host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT, then end the process. Raises OSError when the address cannot be had."""
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    broker = EmbeddedBroker()
    await broker.start()
    listener = await asyncio.start_server(broker.accept, host, port)
    bound_port = int(listener.sockets[0].getsockname()[1])
    log.info("the embedded broker lets anybody in (anonymous, no encryption)", host=host, port=bound_port)
    address = f"mqtt://{format_address(host, bound_port)}"
    events.emit("ready", role="broker", name="embedded", addresses={"mqtt": address}, models=[])
    await stop.wait()
    listener.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
            await broker.shutdown()
    # amqtt may wait for a client's last byte for ever, and its tasks for each other; there is nothing here to save.
    logging.shutdown()
    os._exit(0)


def _quiet_logs() -> None:
    """Logs to stderr; of amqtt's only what ends it, for it warns of every version probe, takeover and killed client."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for name in ("amqtt", "transitions"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Loopback address to listen on.")
@click.option("--port", default=1883, show_default=True, type=click.IntRange(0, 65535), help="0 takes any free port.")
@click.option("--die-with-parent", "parent_pid", type=int, hidden=True, help="End when the process of this id ends.")
def main(host: str, port: int, parent_pid: int | None) -> None:
    """Run the embedded MQTT broker until SIGTERM.

    \b
    Examples:
      python -m tidegate.tools.broker.embedded
      python -m tidegate.tools.broker.embedded --port 1884
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    if host not in LOOPBACK:
        raise click.BadParameter(
            f"{host} is not loopback, and this broker lets anybody in; for a network run Mosquitto, whose files "
            "`tidegate broker config --for mosquitto` writes",
            param_hint="--host",
        )
    _quiet_logs()
    try:
        asyncio.run(serve(host, port))
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        reason = f"cannot listen on {format_address(host, port)} (--host, --port): {why}"
        events.emit("failed", role="broker", name="embedded", reason=reason)
        sys.exit(1)


if __name__ == "__main__":
    main()
