"""The client of a server's repository extension over gRPC, for operators' commands: index, load and unload.

It blocks, since a command does one thing. An error comes back as the class that the server raised, by its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import grpc
from google.protobuf.message import Message

from tidegate.oip.grpc.reflection import SERVICE
from tidegate.oip.status import CODE_KEY
from tidegate.outcome import ServeError, Unreachable, error_from_code
from tidegate.rpc import oip_pb2


class IndexedModel(NamedTuple):
    """One line of an index."""

    name: str
    version: str
    state: str
    reason: str


class ControlClient:
    """One server. Use it in `with`.

    Args:
        address: HOST:PORT of its gRPC port.
        credentials: of TLS; None: plain text.
        token: shown with each change; "" shows none.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        within_s: float = 300.0,
    ) -> None:
        self._address = address
        self._token = token
        self._within_s = within_s
        self._channel = (
            grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
        )

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def index(self) -> Sequence[IndexedModel]:
        """Raises ServeError."""
        response = oip_pb2.RepositoryIndexResponse()
        self._call("RepositoryIndex", oip_pb2.RepositoryIndexRequest(), response)
        return [IndexedModel(one.name, one.version, one.state, one.reason) for one in response.models]

    def load(self, name: str) -> None:
        """Raises ServeError."""
        asked = oip_pb2.RepositoryModelLoadRequest(model_name=name)
        self._call("RepositoryModelLoad", asked, oip_pb2.RepositoryModelLoadResponse())

    def unload(self, name: str) -> None:
        """Raises ServeError."""
        asked = oip_pb2.RepositoryModelUnloadRequest(model_name=name)
        self._call("RepositoryModelUnload", asked, oip_pb2.RepositoryModelUnloadResponse())

    def _call(self, method: str, request: Message, response: Message) -> None:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}", None, None)
        metadata = (("authorization", f"Bearer {self._token}"),) if self._token else ()
        try:
            response.ParseFromString(call(request.SerializeToString(), timeout=self._within_s, metadata=metadata))
        except grpc.RpcError as error:
            raise _served(cast(grpc.Call, error), self._address) from error

    def __repr__(self) -> str:
        return f"<ControlClient of {self._address}>"


def _served(error: grpc.Call, address: str) -> ServeError:
    code = dict(error.trailing_metadata() or ()).get(CODE_KEY)
    words = error.details() or error.code().name
    if code is None:
        return Unreachable(f"no server of the Open Inference Protocol answers at {address}: {words}")
    return error_from_code(str(code), words)
