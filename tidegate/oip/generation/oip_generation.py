"""A generation asked for as an OIP request: text or token ids in, text and ids out, in one answer or a part at a time.

`text_input` is what Triton's generate extension calls the prompt; `input_ids` are taken as they are. Where the model's
text side is here, an answer has both `text_output` and `output_ids`, unless the request names its outputs; where it is
not, as at a target, ids are taken and given. Parameters are those of `tidegate/generate/request.py`, and `stop`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, Self

import msgspec
from msgspec.structs import replace

from tidegate.arrays import split_bytes
from tidegate.generate.check import checked_generation
from tidegate.generate.request import (
    IGNORE_STOP_KEY,
    INPUT_IDS,
    MAX_TOKENS_KEY,
    OUTPUT_IDS,
    SEED_KEY,
    TEMPERATURE_KEY,
    TEXT_INPUT,
    TEXT_OUTPUT,
    TOP_K_KEY,
    TOP_P_KEY,
    generate_request,
    ids_of,
    ids_tensor,
)
from tidegate.generate.text.text_side import TextSide, TextSides, check_room
from tidegate.generate.unserved_parameters import unserved_name
from tidegate.generate.usage import Usage, usage_parameters
from tidegate.models.manifest import Manifest
from tidegate.oip.content_limits import ContentLimits
from tidegate.oip.generation.answer import GenerationAnswer, Piece
from tidegate.oip.generation.bounds import check_words, generative_of, output_tokens, prompt_room
from tidegate.oip.host import ModelHost
from tidegate.outcome import InvalidRequest, NotSupported
from tidegate.text_prompt import PROMPT, TextPrompt
from tidegate.types import Call, Datatype, InferRequest, InferResponse, Reply, Tensor

STOP_KEY: Final = "stop"
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
_SAID_IN_WORDS: Final = (MAX_TOKENS_KEY, TEMPERATURE_KEY, TOP_P_KEY, TOP_K_KEY, SEED_KEY, IGNORE_STOP_KEY)


class OipGeneration:
    """One generation and the form of its answer.

    Args:
        answer: to be entered and read by the caller.
        outputs: the names of those that are wanted.
    """

    def __init__(self, answer: GenerationAnswer, request: InferRequest, version: str, outputs: frozenset[str]) -> None:
        self.answer = answer
        self._request = request
        self._version = version
        self._outputs = outputs

    @classmethod
    async def of(
        cls,
        host: ModelHost,
        call: Call,
        manifest: Manifest,
        texts: TextSides | None,
        limits: ContentLimits,
        *,
        stop: Sequence[str] | None = None,
        whole: bool = False,
    ) -> Self:
        """The generation that a checked call asks for; nothing is sent yet.

        Args:
            stop: stop strings, instead of the parameter.
            whole: its caller wants it in one answer.

        Raises:
            InvalidRequest: names the input or the parameter that is wrong.
            NotSupported: text is wanted of a model whose text side is not here.
        """
        request, model = call.request, generative_of(manifest)
        if (name := unserved_name(request.parameters)) is not None:
            raise InvalidRequest(f"parameter {name!r} is not served: leave it out")
        inputs = {tensor.name: tensor for tensor in request.inputs}
        if model.is_text_only:
            return cls._in_words(host, call, manifest, limits, _stop_of(request) if stop is None else stop, whole)
        if (TEXT_INPUT in inputs) == (INPUT_IDS in inputs):
            raise InvalidRequest(f"a generation takes one of the inputs {TEXT_INPUT!r} and {INPUT_IDS!r}")
        stop = _stop_of(request) if stop is None else stop
        text = await _text_side(manifest, texts, needed=TEXT_INPUT in inputs or bool(stop))
        room = prompt_room(model, limits)
        if text is not None and TEXT_INPUT in inputs:
            prompt = await text.encode(_text_of(inputs[TEXT_INPUT]), room=room)
        else:
            prompt = ids_of(inputs[INPUT_IDS])
            check_room(len(prompt), room)
        said = {name: value for name, value in request.parameters.items() if name != STOP_KEY}
        passed = replace(request, inputs=(ids_tensor(INPUT_IDS, prompt),), outputs=(), parameters=said)
        checked = checked_generation(model, passed)
        asked = checked.max_tokens if MAX_TOKENS_KEY in said else None
        said[MAX_TOKENS_KEY] = output_tokens(model, len(prompt), asked, limits)
        outputs = _outputs(request, manifest, text)
        shown = text if TEXT_OUTPUT in outputs or stop else None
        answer = GenerationAnswer(host, replace(call, request=passed), prompt, shown, stop=stop, whole=whole)
        return cls(answer, request, manifest.version, outputs)

    @classmethod
    def _in_words(
        cls, host: ModelHost, call: Call, manifest: Manifest, limits: ContentLimits, stop: Sequence[str], whole: bool
    ) -> Self:
        """The same of a model whose tokens are not known here: text in, text out."""
        request, model = call.request, generative_of(manifest)
        tensor = next((one for one in request.inputs if one.name == TEXT_INPUT), None)
        if tensor is None:
            raise InvalidRequest(f"missing input {TEXT_INPUT!r}: model {manifest.name!r} is served as text")
        fields: dict[str, Any] = {
            PROMPT: _text_of(tensor),
            **({STOP_KEY: list(stop)} if stop else {}),
            **{name: request.parameters[name] for name in _SAID_IN_WORDS if name in request.parameters},
        }
        fields.setdefault(TEMPERATURE_KEY, 0.0)
        words = TextPrompt({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()})
        check_words(words, model, limits)
        ids = ids_tensor(INPUT_IDS, ())
        asked = generate_request(replace(request, inputs=(ids,)), default_max_tokens=model.default_max_tokens)
        most = output_tokens(model, 0, asked.max_tokens if MAX_TOKENS_KEY in request.parameters else None, limits)
        said = {name: value for name, value in request.parameters.items() if name != STOP_KEY}
        passed = replace(request, inputs=(), outputs=(), parameters={**said, MAX_TOKENS_KEY: most}, text=words)
        answer = GenerationAnswer(host, replace(call, request=passed), (), stop=stop, whole=whole)
        return cls(answer, request, manifest.version, frozenset({TEXT_OUTPUT}))

    def response(self, pieces: Sequence[Piece], usage: Usage | None = None) -> InferResponse:
        """A part of the answer, or all of it. Args: usage: of the last part."""
        outputs: list[Tensor] = []
        if TEXT_OUTPUT in self._outputs:
            text = "".join([piece.text for piece in pieces]).encode()
            outputs.append(Tensor(TEXT_OUTPUT, Datatype.BYTES, (1,), struct.pack("<I", len(text)) + text))
        if OUTPUT_IDS in self._outputs:
            outputs.append(ids_tensor(OUTPUT_IDS, tuple([id for piece in pieces for id in piece.ids])))
        version = self.answer.version or self._request.model_version or self._version
        said = {} if usage is None else usage_parameters(usage)
        return InferResponse(self._request.model_name, version, tuple(outputs), self._request.id, said)

    async def whole(self) -> Reply:
        """All of it in one answer. Raises ServeError."""
        async with self.answer as answer:
            pieces = await answer.whole()
            response = self.response(pieces, answer.usage)
            if answer.reply is None:  # a stop string ended it
                return Reply(response, route=answer.route)
            return replace(answer.reply, response=response)

    def __repr__(self) -> str:
        return f"<OipGeneration of {self._request.model_name} {self.answer!r}>"


async def _text_side(manifest: Manifest, texts: TextSides | None, *, needed: bool) -> TextSide | None:
    if texts is None:
        if needed:
            raise NotSupported(f"model {manifest.name!r} takes token ids here, as {INPUT_IDS!r}, and no text")
        return None
    try:
        return await texts.of(manifest)
    except NotSupported:
        if needed:
            raise
        return None


def _text_of(tensor: Tensor) -> str:
    texts = split_bytes(tensor.raw, name=tensor.name)
    if len(texts) != 1:
        raise InvalidRequest(f"input {TEXT_INPUT!r} has {len(texts)} texts: one prompt a request is served")
    try:
        return texts[0].decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {TEXT_INPUT!r} is no UTF-8: {error.reason} at byte {error.start}") from error


def _outputs(request: InferRequest, manifest: Manifest, text: TextSide | None) -> frozenset[str]:
    if not request.outputs:
        return frozenset({OUTPUT_IDS} if text is None else {OUTPUT_IDS, TEXT_OUTPUT})
    wanted = frozenset(output.name for output in request.outputs)
    if TEXT_OUTPUT in wanted and text is None:
        raise NotSupported(f"model {manifest.name!r} gives token ids here, as {OUTPUT_IDS!r}, and no text")
    return wanted


def _stop_of(request: InferRequest) -> tuple[str, ...]:
    said = request.parameters.get(STOP_KEY, "")
    if not isinstance(said, str):
        raise InvalidRequest(f"parameter {STOP_KEY!r} is {said!r}: a text is wanted")
    return checked_stop([said] if said else [])


def checked_stop(strings: Sequence[str]) -> tuple[str, ...]:
    """Stop strings within their bounds. Raises InvalidRequest."""
    if len(strings) > MAX_STOP_STRINGS or not all(0 < len(one) <= MAX_STOP_CHARACTERS for one in strings):
        raise InvalidRequest(
            f"{STOP_KEY!r} may have {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters at most"
        )
    return tuple(strings)
