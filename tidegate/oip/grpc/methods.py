"""The gRPC methods of an OIP server beside inference, each with its messages and its answer.

An answer is a dict with the fields of its response message. It is worked out from the request and the host that the
caller may see, and from nothing else. The methods that load and unload models are given the process's model control
instead, and answer with an empty message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from google.protobuf.message import Message

from tidegate.oip import metadata
from tidegate.oip.host import ModelHost
from tidegate.oip.repository.model_control import NO_OVERRIDES, ModelControl
from tidegate.outcome import NotSupported
from tidegate.rpc import oip_pb2

Ask = Callable[[Any, ModelHost], Mapping[str, Any]]
Control = Callable[[Any, ModelControl], Awaitable[None]]

HEALTH: Final = frozenset({"ServerLive", "ServerReady"})  # open without credentials


def _server_ready(_: Any, host: ModelHost) -> Mapping[str, Any]:
    return {"ready": host.ready()}


def _server_metadata(_: Any, host: ModelHost) -> Mapping[str, Any]:
    return metadata.server_metadata(host)


def _model_ready(message: oip_pb2.ModelReadyRequest, host: ModelHost) -> Mapping[str, Any]:
    return {"ready": host.model_ready(message.name, message.version)}


def _model_metadata(message: oip_pb2.ModelMetadataRequest, host: ModelHost) -> Mapping[str, Any]:
    manifest = host.manifest(message.name, message.version)
    return metadata.model_metadata(manifest, metadata.versions_of(host, message.name))


def _model_config(message: oip_pb2.ModelConfigRequest, host: ModelHost) -> Mapping[str, Any]:
    return {"config": metadata.model_config(host.manifest(message.name, message.version))}


def _model_statistics(message: oip_pb2.ModelStatisticsRequest, host: ModelHost) -> Mapping[str, Any]:
    return metadata.model_statistics(host.statistics(message.name, message.version))


async def _load(message: oip_pb2.RepositoryModelLoadRequest, control: ModelControl) -> None:
    if message.parameters:
        raise NotSupported(NO_OVERRIDES)
    await control.load(message.model_name or message.repository_name)  # kserve sends it in the repository's field


async def _unload(message: oip_pb2.RepositoryModelUnloadRequest, control: ModelControl) -> None:
    await control.unload(message.model_name or message.repository_name)


ASKED: Final[dict[str, tuple[type[Message], type[Message], Ask]]] = {
    "ServerLive": (oip_pb2.ServerLiveRequest, oip_pb2.ServerLiveResponse, lambda *_: {"live": True}),
    "ServerReady": (oip_pb2.ServerReadyRequest, oip_pb2.ServerReadyResponse, _server_ready),
    "ModelReady": (oip_pb2.ModelReadyRequest, oip_pb2.ModelReadyResponse, _model_ready),
    "ServerMetadata": (oip_pb2.ServerMetadataRequest, oip_pb2.ServerMetadataResponse, _server_metadata),
    "ModelMetadata": (oip_pb2.ModelMetadataRequest, oip_pb2.ModelMetadataResponse, _model_metadata),
    "ModelConfig": (oip_pb2.ModelConfigRequest, oip_pb2.ModelConfigResponse, _model_config),
    "ModelStatistics": (
        oip_pb2.ModelStatisticsRequest, oip_pb2.ModelStatisticsResponse, _model_statistics,
    ),
}  # fmt: skip

CONTROLLED: Final[dict[str, tuple[type[Message], type[Message], Control]]] = {
    "RepositoryModelLoad": (
        oip_pb2.RepositoryModelLoadRequest, oip_pb2.RepositoryModelLoadResponse, _load,
    ),
    "RepositoryModelUnload": (
        oip_pb2.RepositoryModelUnloadRequest, oip_pb2.RepositoryModelUnloadResponse, _unload,
    ),
}  # fmt: skip
