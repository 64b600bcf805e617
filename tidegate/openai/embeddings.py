"""Conversion between OpenAI's embeddings request and inference requests: parsing, grouping into calls, and the answer.

A caller may send two thousand texts of any lengths in one body. Padded to one rectangle they would cost many times
their work, since a padded token costs what a real one does; one call a text would pay the fixed cost of a call for
each. So rows are sorted by length and cut greedily: a row joins the group while re-padding the group costs less than a
call of its own would. Groups also stay within what one batch of the model may hold, so that none is refused for its
size, and short ones can go to edges while long ones go to the pool. The answer is put back into the caller's order.

Token lists are taken as they are, without special tokens: a caller that sends tokens has made the model's input.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.arrays import tensor_to_array
from tidegate.models.manifest import Axis, Manifest, Text
from tidegate.openai.wrong_parameter import WrongParameter, decoded
from tidegate.outcome import BadAnswer, InvalidRequest, TooLarge
from tidegate.types import InferRequest, InferResponse, RequestedOutput, Tensor

MAX_INPUTS: Final = 2048  # OpenAI's own limit
MAX_TEXT_BYTES: Final = 1_000_000

# The cost of a call beside its tokens, in tokens: 15 (int8, edge) to 34 (torch). docs/design/numbers.md, "Model cost".
CALL_COST_TOKENS: Final = 32


class EmbeddingsBody(msgspec.Struct, frozen=True):
    """The fields that mean something here; OpenAI's others (`user`) are ignored as they are there."""

    input: str | list[str | int | list[int]]
    model: str
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """Either texts or rows of tokens, never both."""

    model: str
    base64: bool
    dimensions: int | None
    texts: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One input as token ids; `truncated` where the model takes no more of it."""

    ids: Sequence[int]
    truncated: bool = False


def parse(body: bytes) -> EmbeddingsRequest:
    """The request in a body. Raises WrongParameter, InvalidRequest, TooLarge."""
    asked = decoded(body, _decode)
    texts, tokens = _inputs(asked.input)
    return EmbeddingsRequest(asked.model, asked.encoding_format == "base64", asked.dimensions, texts, tokens)


def text_of(manifest: Manifest) -> Text:
    """How the model takes text. Raises WrongParameter for one that takes none."""
    if manifest.generative is not None:
        raise WrongParameter("model", f"model {manifest.name!r} writes text and gives no vectors: POST /v1/completions")
    if manifest.pipeline is not None:
        raise WrongParameter(
            "model", f"model {manifest.name!r} has a pipeline of its own; call it by /v2/models/{manifest.name}"
        )
    if manifest.text is None:
        raise WrongParameter("model", f"model {manifest.name!r} takes no text; call it by /v2/models/{manifest.name}")
    return manifest.text


def check_dimensions(asked: EmbeddingsRequest, manifest: Manifest) -> None:
    """Raises WrongParameter if another length than the model's own is requested."""
    output = next((spec for spec in manifest.outputs if spec.name == text_of(manifest).output), None)
    length = output.shape[-1] if output is not None and output.shape else None
    if asked.dimensions not in (None, length):
        raise WrongParameter(
            "dimensions",
            f"model {manifest.name!r} gives {length} dimensions and cannot shorten them to {asked.dimensions}",
        )


def token_rows(tokens: Sequence[Sequence[int]], max_tokens: int) -> list[TokenRow]:
    """Rows of a caller's own tokens, cut to the model's length."""
    return [TokenRow(ids[:max_tokens], truncated=len(ids) > max_tokens) for ids in tokens]


def check_rows(rows: Sequence[TokenRow]) -> None:
    """Raises WrongParameter for a text of which the tokenizer makes nothing.

    Beside longer ones it would be a row of padding alone, and its vector what the model makes of that.
    """
    for index, row in enumerate(rows):
        if not row.ids:
            raise WrongParameter("input", f"input[{index}] has no token: the model's tokenizer makes none of it")


def groups(lengths: Sequence[int], *, max_rows: int, max_work: int | None) -> list[list[int]]:
    """Indices of rows that go into one call each, every index once. `max_work` bounds the tokens, padding included."""
    found: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        rows = len(found[-1]) if found else max_rows
        if (
            rows < max_rows
            and (max_work is None or (rows + 1) * length <= max_work)
            and rows * (length - longest) <= CALL_COST_TOKENS
        ):
            found[-1].append(index)
        else:
            found.append([index])
        longest = length
    return found


def group_limits(manifest: Manifest) -> tuple[int, int | None]:
    """The most rows and the most work of one call of this model."""
    spec = next(spec for spec in manifest.inputs if spec.name == text_of(manifest).input_ids)
    axis = manifest.axes.get(str(spec.shape[0]), Axis())
    return max(1, min(axis.max, manifest.batching.max_batch_size)), manifest.batching.max_work


def infer_request(
    manifest: Manifest, rows: Sequence[TokenRow], request_id: str = "", *, pinned: bool = True
) -> InferRequest:
    """One call's request: the rows padded to the longest of them, with the mask that says what is padding.

    Args:
        pinned: whether only the manifest's version may answer: the vectors of one answer are all of one version.
    """
    text = text_of(manifest)
    width = max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids)] = row.ids
        mask[at, : len(row.ids)] = 1
    return InferRequest(
        model_name=manifest.name,
        model_version=manifest.version if pinned else "",
        inputs=(_tensor(manifest, text.input_ids, ids), _tensor(manifest, text.attention_mask, mask)),
        outputs=(RequestedOutput(text.output),),
        id=request_id,
    )


def vectors(response: InferResponse, output: str, rows: int) -> NDArray[np.float32]:
    """The answer's vectors, float32[rows, dimension]. Raises BadAnswer."""
    tensor = next((tensor for tensor in response.outputs if tensor.name == output), None)
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[0] != rows:
        raise BadAnswer(f"the model's answer has no {output!r} of {rows} vectors")
    try:
        return np.asarray(tensor_to_array(tensor), dtype="<f4")
    except InvalidRequest as error:
        raise BadAnswer(error.message) from error


def answer(
    asked: EmbeddingsRequest, rows: Sequence[TokenRow], found: Mapping[int, NDArray[np.float32]], words: Any
) -> dict[str, Any]:
    """The body of the answer; `words` say where it was made, in a field that OpenAI's clients pass by.

    Raises:
        InvalidRequest: a vector has no JSON form.
    """
    used = sum(len(row.ids) for row in rows)
    truncated = [index for index, row in enumerate(rows) if row.truncated]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _embedding(index, found[index], asked.base64)}
            for index in range(len(rows))
        ],
        "model": asked.model,
        "usage": {"prompt_tokens": used, "total_tokens": used},
        "tidegate": {**words, **({"truncated": truncated} if truncated else {})},
    }


_decode = msgspec.json.Decoder(EmbeddingsBody).decode


def _inputs(given: str | list[str | int | list[int]]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Texts or token rows from the four forms that OpenAI allows."""
    items: list[Any] = given if isinstance(given, list) else [given]
    if not items:
        raise WrongParameter("input", "input must not be an empty list")
    if all(isinstance(item, int) for item in items):
        items = [items]
    if len(items) > MAX_INPUTS:
        raise WrongParameter("input", f"input has {len(items)} entries; at most {MAX_INPUTS} may come in one request")
    if all(isinstance(item, str) for item in items):
        return tuple(map(_text, items)), ()
    if all(isinstance(item, list) for item in items):
        return (), tuple(map(_token_row, items))
    raise WrongParameter(
        "input", "input must be a text, a list of texts, a list of tokens or a list of lists of tokens"
    )


def _text(text: str) -> str:
    if not text:
        raise WrongParameter("input", "input must not hold an empty text")
    # UTF-8 has at most four bytes a character, so most texts need not be encoded to be known small enough.
    if len(text) * 4 > MAX_TEXT_BYTES and len(text.encode()) > MAX_TEXT_BYTES:
        raise TooLarge(f"a text of input is larger than {MAX_TEXT_BYTES} bytes")
    return text


def _token_row(tokens: list[int]) -> tuple[int, ...]:
    if not tokens:
        raise WrongParameter("input", "input must not hold an empty list of tokens")
    if max(tokens) >= 2**31 or min(tokens) < 0:
        raise WrongParameter("input", "input holds a number that is no token")
    return tuple(tokens)


def _tensor(manifest: Manifest, name: str, array: NDArray[np.int64]) -> Tensor:
    datatype = next(spec.datatype for spec in manifest.inputs if spec.name == name)
    return Tensor(name, datatype, array.shape, array.astype(datatype.numpy_name).tobytes())


def _embedding(index: int, vector: NDArray[np.float32], as_base64: bool) -> Any:
    """Raises InvalidRequest: JSON has no numbers for what is in it; null, which it would become, is none."""
    if as_base64:
        return base64.b64encode(vector.tobytes()).decode()
    if not np.isfinite(vector).all():
        raise InvalidRequest(
            f"the vector of input[{index}] holds infinity or NaN, which have no JSON form; ask for base64"
        )
    return vector.tolist()
