"""Three instant targets in one process: each port answers plain OIP calls and the link stream with the same embedding.

Plain calls get bytes that were made beforehand, so that this process is never what limits; the link is answered by the
very `LinkService` that edges and pools run, with its checks, over a host that computes nothing.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import uvloop

from tests.bench import workload
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.link.service import LinkService
from tidegate.models.manifest import Manifest
from tidegate.models.repository import parse_manifest
from tidegate.oip.grpc.codec import message_from_response
from tidegate.oip.grpc.server import server_options
from tidegate.oip.host import ModelStatistics
from tidegate.rpc import oip_pb2
from tidegate.types import Accepted, Call, InferResponse, LoadReport, Reply

TARGETS = 3
OFFERS = (
    ModelOffer(workload.MODEL, "1", (VariantOffer("fp32", "fp32", cost=((1.0, 0.0001), (1000.0, 0.0002))),)),
)  # fmt: skip
Answer = Callable[[bytes, object], Awaitable[bytes]]


class InstantHost:
    """A `ModelHost` that accepts and answers in the same moment."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._response = workload.response()
        self._load_sequence = 0

    @property
    def server_name(self) -> str:
        return "instant"

    def ready(self) -> bool:
        return True

    def manifests(self) -> Sequence[Manifest]:
        return (self._manifest,)

    def manifest(self, name: str, version: str = "") -> Manifest:
        return self._manifest

    def model_ready(self, name: str, version: str = "") -> bool:
        return True

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        return ()

    async def infer(self, call: Call) -> Reply:
        if call.on_accepted is not None:
            call.on_accepted(Accepted(0, 0.0))
        answer = self._response
        return Reply(InferResponse(answer.model_name, answer.model_version, answer.outputs, call.request.id))

    def load(self) -> LoadReport:
        self._load_sequence += 1
        return LoadReport(1, self._load_sequence, 0, 0, 0.0)


def constant(message: bytes) -> Answer:
    async def answer(_request: bytes, _context: object) -> bytes:
        return message

    return answer


def metadata() -> bytes:
    answer = oip_pb2.ModelMetadataResponse(name=workload.MODEL, versions=["1"], platform="instant")
    for name in ("input_ids", "attention_mask"):
        answer.inputs.add(name=name, datatype="INT64", shape=[-1, -1])
    answer.outputs.add(name="sentence_embedding", datatype="FP32", shape=[-1, workload.WIDTH])
    return answer.SerializeToString()


async def start_target(number: int, host: InstantHost) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=server_options(2**26))
    answers = {
        "ModelInfer": message_from_response(workload.response()).SerializeToString(),
        "ServerReady": oip_pb2.ServerReadyResponse(ready=True).SerializeToString(),
        "ModelMetadata": metadata(),
        "ModelConfig": oip_pb2.ModelConfigResponse().SerializeToString(),
    }
    handlers = {name: grpc.unary_unary_rpc_method_handler(constant(message)) for name, message in answers.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    LinkService(
        host, name=f"pool/{number}", epoch=lambda: 1, offers=lambda: OFFERS, load=host.load
    ).add_to(server)  # fmt: skip
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def main() -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    host = InstantHost(parse_manifest(workload.MANIFEST, Path("bench")))
    started = [await start_target(number, host) for number in range(TARGETS)]
    print(json.dumps({"event": "ready", "ports": [port for _, port in started]}), flush=True)
    await stopping.wait()
    for server, _ in started:
        await server.stop(None)


if __name__ == "__main__":
    uvloop.run(main())
