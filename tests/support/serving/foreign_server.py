"""A small server of the Open Inference Protocol over gRPC that is none of ours, as a process; signals make it ill.

It knows what the protocol defines and nothing else: no accept-ack, no load, no stage times. It answers zeros, and takes
the time that the pool's variant of the model would (its pace), at most `SLOTS` requests at once. Probes of its
readiness are answered whatever else it does.

SIGUSR1 makes it take requests and answer none, and the next one lets it answer. SIGWINCH makes it twenty times slower,
and the next one mends it.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, Final

import click
import grpc
import yaml

from tests.support.slow_worker import TIMES_SLOWER, sleep_while
from tidegate import clock
from tidegate.engines.paced import read_pace
from tidegate.estimate.cost_table import CostTable
from tidegate.models.manifest import Manifest, TensorSpec
from tidegate.models.repository import Repository
from tidegate.rpc import oip_pb2
from tidegate.runtime import events
from tidegate.runtime.lifeline import die_with_parent

SLOTS: Final = 8
_SERVICE: Final = "inference.GRPCInferenceService"
Context = grpc.aio.ServicerContext[Any, Any]


class ForeignServer:
    """Answers one model; `hang` and `slow` turn its faults."""

    def __init__(self, manifest: Manifest, table: CostTable) -> None:
        self._manifest = manifest
        self._table = table
        self._answers = asyncio.Event()
        self._answers.set()
        self._slots = asyncio.Semaphore(SLOTS)
        self._is_slow = False

    def hang(self) -> None:
        """Answer no request until the next call."""
        (self._answers.clear if self._answers.is_set() else self._answers.set)()

    def slow(self) -> None:
        """Take twenty times as long until the next call."""
        self._is_slow = not self._is_slow

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "ServerReady": (self._ready, oip_pb2.ServerReadyRequest),
            "ModelMetadata": (self._metadata, oip_pb2.ModelMetadataRequest),
            "ModelInfer": (self._infer, oip_pb2.ModelInferRequest),
        }
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(
                    method,
                    request_deserializer=request.FromString,
                    response_serializer=lambda answer: answer.SerializeToString(),
                )
                for name, (method, request) in methods.items()
            },
        )

    async def _ready(self, _request: oip_pb2.ServerReadyRequest, _context: Context) -> oip_pb2.ServerReadyResponse:
        return oip_pb2.ServerReadyResponse(ready=True)

    async def _metadata(self, request: oip_pb2.ModelMetadataRequest, context: Context) -> oip_pb2.ModelMetadataResponse:
        model = self._manifest
        if request.name != model.name:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no model {request.name!r}")
        answer = oip_pb2.ModelMetadataResponse(name=model.name, versions=[model.version], platform="made up")
        for specs, told in ((model.inputs, answer.inputs), (model.outputs, answer.outputs)):
            for spec in specs:
                told.add(name=spec.name, datatype=str(spec.datatype.value), shape=_shape(spec))
        return answer

    async def _infer(self, request: oip_pb2.ModelInferRequest, _context: Context) -> oip_pb2.ModelInferResponse:
        shape = request.inputs[0].shape
        rows = int(shape[0])
        async with self._slots:
            seconds = self._table.seconds_for(float(rows * shape[1]))
            await clock.sleep(seconds)
            await sleep_while((TIMES_SLOWER - 1.0) * seconds, lambda: self._is_slow)
            await self._answers.wait()
        (output,) = self._manifest.outputs
        width = int(output.shape[-1])
        answer = oip_pb2.ModelInferResponse(
            model_name=request.model_name, model_version=self._manifest.version, id=request.id
        )
        answer.outputs.add(name=output.name, datatype=str(output.datatype.value), shape=[rows, width])
        answer.raw_output_contents.append(bytes(4 * rows * width))
        return answer


def _shape(spec: TensorSpec) -> list[int]:
    return [length if isinstance(length, int) else -1 for length in spec.shape]


async def _serve(config: dict[str, Any]) -> None:
    repository = Repository(Path(config["model_repository"]))
    (manifest,) = repository.manifests()
    (variant,) = manifest.variants_for("pool")
    pace = read_pace(repository.artefact(manifest, variant))
    table = CostTable([(units, 1e-3 * cost_ms) for units, cost_ms in pace.cost_ms])
    foreign, loop = ForeignServer(manifest, table), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, foreign.hang)
    loop.add_signal_handler(signal.SIGWINCH, foreign.slow)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((foreign.handler(),))
    port = server.add_insecure_port(f"127.0.0.1:{config['grpc_port']}")
    await server.start()
    events.emit("ready", role="foreign", name=config["name"], addresses={"grpc": f"127.0.0.1:{port}"}, models=[])
    await server.wait_for_termination()


@click.command()
@click.option("--config", type=click.Path(path_type=Path))
@click.option("--die-with-parent", "parent_pid", type=int)
def main(config: Path, parent_pid: int | None) -> None:
    if parent_pid is not None:
        die_with_parent(parent_pid)
    asyncio.run(_serve(yaml.safe_load(config.read_text())))


if __name__ == "__main__":
    main()
