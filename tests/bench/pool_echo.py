"""The floor of a pool server: the same frames and messages over the same gRPC streams, with no serving between them.

A request is parsed and its answer is built and serialized anew, as any server must; what a pool does besides (checks,
deadlines, a queue, batches, a worker, load reports) is left out. Frames that came in one Envelope are answered in one.
"""

from __future__ import annotations

import asyncio
import json
import signal

import grpc
import uvloop

from tests.bench import workload
from tidegate.link import frames
from tidegate.link.frames import AnswerFrame, Greeting
from tidegate.link.streams import METHOD, SERVICE
from tidegate.oip.grpc.codec import message_from_response, request_from_bytes
from tidegate.oip.grpc.server import server_options
from tidegate.types import InferResponse, LoadReport

Context = grpc.aio.ServicerContext[bytes, bytes]

_LOAD = LoadReport(1, 1, 0, 0, 0.0)
_OUTPUTS = workload.response().outputs


def answered(raw: bytes) -> bytes:
    request = request_from_bytes(raw)
    return message_from_response(InferResponse(request.model_name, "1", _OUTPUTS, request.id)).SerializeToString()


async def exchange(_requests: object, context: Context) -> None:
    """The link's method."""
    await context.write(frames.hello(Greeting("pool/echo", 1, "")))
    while isinstance(envelope := await context.read(), bytes):
        out = [
            frames.answer(frame.request.id, AnswerFrame(answered(frame.request.message), 0.0, 0.0, 1, "fp32", _LOAD))
            for frame in frames.parse(envelope)
            if frame.WhichOneof("kind") == "request"
        ]
        if out:
            await context.write(b"".join(out))


async def infer(raw: bytes, _context: object) -> bytes:
    """OIP's ModelInfer."""
    return answered(raw)


async def main() -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    server = grpc.aio.server(options=server_options(2**26))
    unary = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    stream = {METHOD: grpc.stream_stream_rpc_method_handler(exchange)}
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("inference.GRPCInferenceService", unary),
            grpc.method_handlers_generic_handler(SERVICE, stream),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"event": "ready", "addresses": {"grpc": f"127.0.0.1:{port}"}}), flush=True)
    await stopping.wait()
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(main())
