"""The floor of a target behind a link: the same frames and messages on the same gRPC stream, with no serving between.

A request is parsed and its answer is built and serialized anew, as any target must; what a target does besides (checks,
deadlines, a queue, a worker, load reports) is left out. Frames that came in one Envelope are answered in one.
"""

from __future__ import annotations

import asyncio
import json
import signal

import grpc
import uvloop

from tests.bench import workload
from tests.bench.upstream_server import OFFERS
from tidegate.link import frames
from tidegate.link.frames import AnswerFrame, Greeting
from tidegate.link.streams import METHOD, SERVICE
from tidegate.oip.grpc.codec import message_from_response, request_from_bytes
from tidegate.oip.grpc.server import server_options
from tidegate.types import InferResponse, LoadReport

_LOAD = LoadReport(1, 1, 0, 0, 0.0)
_OUTPUTS = workload.response().outputs


def answered(raw: bytes) -> bytes:
    request = request_from_bytes(raw)
    return message_from_response(InferResponse(request.model_name, "1", _OUTPUTS, request.id)).SerializeToString()


async def exchange(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    """The link's method."""
    await context.write(frames.hello(Greeting("edge/echo", 1, "", OFFERS)))
    while isinstance(envelope := await context.read(), bytes):
        out = []
        for frame in frames.parse(envelope):
            kind = frame.WhichOneof("kind")
            if kind == "request":
                answer = AnswerFrame(answered(frame.request.message), 0.0, 0.0, 1, "fp32", _LOAD)
                out.append(frames.answer(frame.request.id, answer))
            elif kind == "ping":
                out.append(frames.pong(frame.ping.sent_at_us))
        if out:
            await context.write(b"".join(out))


async def main() -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    server = grpc.aio.server(options=server_options(2**26))
    stream = {METHOD: grpc.stream_stream_rpc_method_handler(exchange)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, stream),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"event": "ready", "addresses": {"grpc": f"127.0.0.1:{port}"}}), flush=True)
    await stopping.wait()
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(main())
