"""Real protocols through links: they pass untouched, and feel what a network would make them feel."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tests.tidegate.netsim.proxy.ends import CLEAR, Client, linked, pattern, source
from tidegate.netsim.links.profile import Jitter
from tidegate.netsim.links.stream import StreamProfile
from tidegate.netsim.proxy.link import LinkProxy

pytestmark = pytest.mark.slow
WIFI = StreamProfile(delay_ms=2.0, jitter=Jitter("lognormal", 1.0), to_mbit=200.0, from_mbit=200.0, queue_kbyte=256)
METHOD = "/tests.Echo/Say"


class EchoServer(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        async def say(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(say)  # type: ignore[arg-type]


async def grpc_server() -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((EchoServer(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def test_grpc_calls_pass_and_fail_as_on_a_network() -> None:
    server, port = await grpc_server()
    options = (("grpc.keepalive_time_ms", 10_000), ("grpc.use_local_subchannel_pool", 1))
    try:
        async with LinkProxy(("127.0.0.1", port)) as link, grpc.aio.insecure_channel(link.address, options) as channel:
            link.apply(WIFI)
            say = channel.unary_unary(METHOD)
            bodies = [pattern(size) for size in (0, 1, 70_000, 1_000_000)]
            assert await asyncio.gather(*(say(body, timeout=20) for body in bodies)) == bodies

            link.partition("blackhole")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await say(b"lost", timeout=0.1)
            assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

            link.heal()
            assert await say(b"back", timeout=20) == b"back"

            link.partition("reset")
            link.heal()
            for _ in range(20):  # until gRPC has noticed, calls still go out on the old connection and are told so
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await say(b"again", timeout=20, wait_for_ready=True) == b"again"
                    break
            else:
                pytest.fail("no call got through after the reset")
        assert link.violations == 0
        assert link.accepted >= 2
    finally:
        await server.stop(0)


async def test_a_grpc_client_of_a_server_that_accepts_and_says_nothing_hears_of_it_at_its_deadline() -> None:
    # nice-grpc #904: TCP is there, HTTP/2's SETTINGS never come
    server, port = await grpc_server()
    options = (("grpc.use_local_subchannel_pool", 1),)
    try:
        async with LinkProxy(("127.0.0.1", port)) as link:
            link.partition("silent")
            async with grpc.aio.insecure_channel(link.address, options) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await channel.unary_unary(METHOD)(b"hello", timeout=0.3, wait_for_ready=True)
                assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            link.heal()
            async with grpc.aio.insecure_channel(link.address, options) as channel:
                assert await channel.unary_unary(METHOD)(b"hello", timeout=20) == b"hello"
    finally:
        await server.stop(0)


@pytest.mark.skipif(MOSQUITTO is None, reason="Mosquitto is not installed here")
@pytest.mark.needs_mosquitto
async def test_mqtt_keeps_every_acknowledged_message_over_a_link_that_breaks(tmp_path: Path) -> None:
    with Mosquitto(tmp_path) as broker:
        async with LinkProxy(("127.0.0.1", broker.port)) as link:
            link.apply(WIFI)
            listener, speaker = Mqtt("listener", link), Mqtt("speaker", link)
            await listener.started()
            await listener.subscribe("tide/#")
            await speaker.started()
            for number in range(20):
                speaker.publish(f"tide/{number}", b"high")
                if number == 10:
                    link.partition("reset")
                    link.heal()
            await listener.until(lambda: len(listener.topics) == 20)
            listener.stop()
            speaker.stop()
        assert link.violations == 0


class Mqtt:
    """A paho client that keeps its session, told of what arrives on the loop."""

    def __init__(self, name: str, link: LinkProxy) -> None:
        self.topics: set[str] = set()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._acks = 0
        self._client = mqtt.Client(
            CallbackAPIVersion.VERSION2, client_id=name, clean_session=False, reconnect_on_failure=True
        )
        self._client.reconnect_delay_set(1, 1)
        self._client.on_message = lambda *args: self._note(args[2].topic)
        self._client.on_connect = self._client.on_subscribe = lambda *_: self._note(None)
        self._client.connect_async(link.host, link.port)
        self._client.loop_start()

    def _note(self, topic: str | None) -> None:
        def on_loop() -> None:
            self._acks += topic is None
            if topic is not None:
                self.topics.add(topic)
            self._changed.set()

        self._loop.call_soon_threadsafe(on_loop)

    async def started(self) -> None:
        await self.until(lambda: self._acks >= 1)

    async def subscribe(self, topic: str) -> None:
        acks = self._acks
        self._client.subscribe(topic, qos=1)
        await self.until(lambda: self._acks > acks)

    def publish(self, topic: str, body: bytes) -> None:
        self._client.publish(topic, body, qos=1)

    def stop(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """(certificate, key) for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed here")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        capture_output=True, check=True,
    )  # fmt: skip
    return cert, key


async def test_tls_passes_untouched(certificate: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pattern(500_000))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server, LinkProxy(server.sockets[0].getsockname()) as link:
        link.apply(WIFI)
        trust = ssl.create_default_context(cafile=str(certificate[0]))
        reader, writer = await asyncio.open_connection(link.host, link.port, ssl=trust)
        assert await reader.read() == pattern(500_000)
        writer.close()
        await writer.wait_closed()


async def test_many_connections_at_once_each_get_their_own_bytes() -> None:
    async with linked(source(20_000), CLEAR) as link:

        async def fetch() -> bytes:
            async with Client(link) as client:
                return await client.reader.read()

        got = await asyncio.gather(*(fetch() for _ in range(200)))
    assert set(got) == {pattern(20_000)}
