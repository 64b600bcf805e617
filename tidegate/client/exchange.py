"""One call as a request that HTTP can send and a function that reads its answer; both clients share these.

Pure: arrays and texts become bodies here, and bodies answers. Tensors travel as bytes behind the JSON (Triton's binary
tensor data extension), vectors as base64, so that no number is spelled out in decimals.

What comes back is read as hostile: sizes are compared with the body, and whatever does not fit is a `BadAnswer`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.client.answers import EmbeddingsAnswer, InferenceAnswer, TextAnswer, call_record
from tidegate.oip.http.codec import HEADER_LENGTH_KEY
from tidegate.outcome import BadAnswer, InvalidRequest
from tidegate.types import Datatype, Tensor

AnswerT = TypeVar("AnswerT")
Messages = str | Sequence[Mapping[str, Any]]

_JSON: Final = {"content-type": "application/json"}
_SIZE: Final = "binary_data_size"
_BY_DTYPE: Final = {np.dtype(one.numpy_name): one for one in Datatype if one not in (Datatype.BF16, Datatype.BYTES)}
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Exchange(Generic[AnswerT]):
    """What to post, and how to read the answer. `repeatable`: whether it may be sent twice without another effect."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    read: Callable[[Mapping[str, str], bytes], AnswerT]
    repeatable: bool = True


def embed_exchange(model: str, texts: str | Sequence[str]) -> Exchange[EmbeddingsAnswer]:
    """Texts to vectors, `POST /v1/embeddings`."""
    body = {"model": model, "input": texts if isinstance(texts, str) else list(texts), "encoding_format": "base64"}
    return Exchange("/v1/embeddings", _encode(body), _JSON, _read_embeddings)


def infer_exchange(
    model: str, inputs: Mapping[str, ArrayLike], outputs: Iterable[str] | None, parameters: Mapping[str, Any]
) -> Exchange[InferenceAnswer]:
    """Arrays to arrays, `POST /v2/models/MODEL/infer`.

    Raises:
        InvalidRequest: an input's type has no counterpart in the Open Inference Protocol.
    """
    tensors = [_tensor(name, value) for name, value in inputs.items()]
    told: dict[str, Any] = {
        "inputs": [
            {"name": one.name, "datatype": one.datatype, "shape": one.shape, "parameters": {_SIZE: len(one.raw)}}
            for one in tensors
        ],
        "parameters": {**parameters, "binary_data_output": True},
    }
    if outputs is not None:
        told["outputs"] = [{"name": name} for name in outputs]
    json = _encode(told)
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH_KEY: str(len(json))}
    body = b"".join((json, *(one.raw for one in tensors)))
    path = f"/v2/models/{quote(model, safe='')}/infer"
    return Exchange(path, body, headers, _read_inference, repeatable="sequence_id" not in parameters)


def chat_exchange(model: str, messages: Messages, wanted: Mapping[str, Any]) -> Exchange[TextAnswer]:
    """A conversation to its next text, `POST /v1/chat/completions`. A plain string is the user's one message."""
    told = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = _encode({"model": model, "messages": told, **wanted})
    return Exchange("/v1/chat/completions", body, _JSON, _read_chat)


def _tensor(name: str, value: ArrayLike) -> Tensor:
    array = _array(value)
    if array.dtype.kind in "USO":
        return array_to_tensor(name, array.astype(object), Datatype.BYTES)
    datatype = _BY_DTYPE.get(array.dtype.newbyteorder("<"))
    if datatype is None:
        raise InvalidRequest(f"input {name!r}: arrays of {array.dtype} cannot be sent; convert it to another type")
    return array_to_tensor(name, array, datatype)


def _array(value: ArrayLike) -> NDArray[Any]:
    if not isinstance(value, list | tuple | str | bytes | float):
        return np.asarray(value)
    objects = np.array(value, dtype=object)
    if objects.size and isinstance(objects.flat[0], str | bytes):
        return objects  # numpy's own types of texts would drop zero bytes at the end
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array  # hardly any model takes doubles


def _read_embeddings(headers: Mapping[str, str], body: bytes) -> EmbeddingsAnswer:
    told = _decoded(body)
    try:
        rows = [np.frombuffer(base64.b64decode(one["embedding"], validate=True), "<f4") for one in told["data"]]
        vectors: NDArray[np.float32] = np.stack(rows)
        tokens = int(told.get("usage", {}).get("prompt_tokens", 0))
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise BadAnswer(f"the server's embeddings cannot be read: {error!r}") from error
    return EmbeddingsAnswer(vectors, tokens, call_record(headers))


def _read_inference(headers: Mapping[str, str], body: bytes) -> InferenceAnswer:
    try:
        length = int(headers.get(HEADER_LENGTH_KEY.lower(), len(body)))
        told, view, at = _decoded(body[:length]), memoryview(body)[length:], 0
        outputs = {}
        for one in told["outputs"]:
            size = (one.get("parameters") or {}).get(_SIZE)
            if size is None:
                outputs[one["name"]] = _spelled_out(one)
                continue
            tensor = Tensor(one["name"], Datatype(one["datatype"]), tuple(one["shape"]), view[at : at + size])
            outputs[tensor.name] = tensor_to_array(tensor)
            at += size
        return InferenceAnswer(outputs, str(told.get("model_version", "")), call_record(headers))
    except (KeyError, TypeError, ValueError, AttributeError, InvalidRequest) as error:
        raise BadAnswer(f"the server's outputs cannot be read: {error}") from error


def _spelled_out(output: Mapping[str, Any]) -> NDArray[Any]:
    datatype = Datatype(output["datatype"])
    array: NDArray[Any] = np.asarray(output["data"], np.dtype(datatype.numpy_name)).reshape(output["shape"])
    return array


def _read_chat(headers: Mapping[str, str], body: bytes) -> TextAnswer:
    told = _decoded(body)
    try:
        choice = told["choices"][0]
        message = choice["message"]
        return TextAnswer(
            text=message.get("content") or "",
            finish_reason=choice.get("finish_reason") or "",
            usage=told.get("usage") or {},
            served=call_record(headers),
            tool_calls=tuple(message.get("tool_calls") or ()),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadAnswer(f"the server's chat cannot be read: {error!r}") from error


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswer(f"the server's answer is no JSON: {error}") from error
