"""The descriptors of `inference.GRPCInferenceService`, so that grpcurl and Postman can call it with no .proto at hand.

Our messages are declared in package `tidegate.oip` (two files of package `inference` cannot live in one process). On
the wire they are the same messages, so for reflection the file is copied into a pool of its own with the public package
name and the service added; nothing of it reaches the default pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2

from tidegate.rpc import oip_pb2

SERVICE: Final = "inference.GRPCInferenceService"

_FROM: Final = ".tidegate.oip."
_TO: Final = ".inference."


def inference_pool(methods: Iterable[tuple[str, str, str, bool]]) -> descriptor_pool.DescriptorPool:
    """A pool with the service. `methods`: name, request message, response message, whether both are streams."""
    file = descriptor_pb2.FileDescriptorProto()
    file.ParseFromString(oip_pb2.DESCRIPTOR.serialized_pb)
    file.name, file.package = "grpc_service.proto", "inference"
    for message in file.message_type:
        _rename_types(message)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for name, request, response, streaming in methods:
        service.method.add(
            name=name,
            input_type=_TO + request,
            output_type=_TO + response,
            client_streaming=streaming,
            server_streaming=streaming,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    pool.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
    return pool


def _rename_types(message: descriptor_pb2.DescriptorProto) -> None:
    for field in message.field:
        if field.type_name.startswith(_FROM):
            field.type_name = _TO + field.type_name.removeprefix(_FROM)
    for nested in message.nested_type:
        _rename_types(nested)
