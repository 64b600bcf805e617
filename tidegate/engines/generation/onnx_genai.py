"""The onnxruntime-genai engine: generation on the processor of a small device, with int4 weights.

Each sequence has a generator of its own, so that it can be paused, and cancelled between any two tokens; a batch gains
nothing on one core. A step is of one sequence, the most urgent: a chunk of its prompt, or one token. What a chunk
costs the others is its length, and what it costs itself is the shorter matrices' lower speed.

    chunk of 16, 32, 64, 128, 512 tokens    60, 101, 179, 355, 1553 ms    265, 317, 358, 361, 330 tokens a CPU-second

(SmolLM2-135M in int4, one thread, with a decode at 67 to 85 tokens a CPU-second.) Chunks of 64 and of 512 give the same
tokens (those of 16 other ones at 4 of 741 places), but a token that is computed alone is rounded otherwise: the next
logits differ by up to 1. So where an answer goes on that another engine began, and its choices can be repeated (greedy,
or with a seed), its tokens are computed one by one, as they were made. That takes four times as long as chunks, and the
text is the one that would have come.

The attention cache of a sequence is made for its prompt and `max_tokens` when it begins, so what is asked for is what
is taken. Where all caches may not hold more than `cache_bytes`, a sequence waits for room in the order of arrival, and
one that would never fit is refused.

What is sampled is chosen here (`token_choice.py`) and given back to the runtime as if it were of the prompt, which
costs a step no more. The runtime's own sampling sorts the vocabulary (0.18.0: 20 ms a token instead of 9, with 49,152
tokens), knows no place in the answer to go on from, and for `top_p` alone lets tokens through that lie beyond the
nucleus. It is left to it where a text follows a grammar, which is the runtime's: `top_p` is then asked for with the
whole vocabulary as `top_k`, which makes it exact. Log-probabilities are those of the model, before temperature,
filters and grammar.

Spinning is off (`tidegate/engines/onnx.py`), and so is telemetry (`tidegate/engines/__init__.py`), which the call that
is named for it does not prevent from keeping a database.

It can be wrong where a schema is used: its grammar is compiled when the sequence begins, which takes some 1 ms, and
0.5 s the first time. And the runtime takes each token that is a part of a character for U+FFFD (0.18.0), so it cannot
write an emoji that a schema demands: that ends the sequence as one that is refused, for the engine is well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime_genai

from tidegate import clock
from tidegate.engines.errors import EngineError, failure_of
from tidegate.engines.generation.genai_config import read_genai_config
from tidegate.engines.generation.limits import NO_LIMITS, GenerationLimits
from tidegate.engines.generation.logprobs import token_logprobs
from tidegate.engines.generation.prompt_check import check_prompt
from tidegate.engines.generation.sampling import is_greedy
from tidegate.engines.generation.token_choice import TokenChoice, TokenLogprobs
from tidegate.generate.engine import SequenceProgress
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import FinishReason
from tidegate.token_sink import TokenBatch

DEFAULT_SLOTS: Final = 4
CHUNK_TOKENS: Final = 64
# What the runtime says where a grammar is at its end: of an emoji, say, whose bytes are tokens that it cannot tell.
_OF_GRAMMARS: Final = ("Error committing tokens", "Error computing mask", "Error creating grammar", "Parser Error")
_MAX_REASON: Final = 400  # characters
_LOOK_AGAIN_S: Final = 0.005  # whether there is room for another cache, where all that are due wait for it


class GenaiSequence:
    """One sequence. Its generator is made when there is room for its cache."""

    __slots__ = ("_choice", "_chosen", "_generator", "cache_tokens", "made", "prefilled", "request", "stop_tokens")

    def __init__(
        self, request: GenerateRequest, cache_tokens: int, stop_tokens: frozenset[int], choice: TokenChoice
    ) -> None:
        self.request = request
        self.cache_tokens = cache_tokens
        self.stop_tokens = stop_tokens
        self._choice = choice
        self._chosen: int | None = None  # the last token, which the generator does not have yet
        self._generator: Any = None
        self.prefilled = 0  # tokens of the prompt
        self.made = 0

    @property
    def has_begun(self) -> bool:
        """Whether it has a generator, and with it its cache."""
        return self._generator is not None

    @property
    def _replayed_from(self) -> int:
        """Where in the prompt the tokens begin that are computed one by one, as they were when they were made."""
        request = self.request
        is_repeatable = self._choice.is_greedy or request.sampling.seed is not None
        return len(request.prompt) - (request.answered if is_repeatable else 0)

    @property
    def is_runtimes(self) -> bool:
        """Whether the runtime chooses its tokens."""
        return self._choice.is_greedy or bool(self.request.schema)

    def begin(self, generator: Any) -> None:
        self._generator = generator

    def prefill(self) -> bool:
        """Compute the next chunk of the prompt; whether all of it is computed now."""
        prompt = self.request.prompt
        if self.prefilled < len(prompt):
            end = self._replayed_from
            end = min(end, self.prefilled + CHUNK_TOKENS) if self.prefilled < end else self.prefilled + 1
            chunk = prompt[self.prefilled : end]
            self._generator.append_tokens(np.array(chunk, np.int32))
            self.prefilled += len(chunk)
        return self.prefilled == len(prompt)

    def next_token(self) -> tuple[int, TokenLogprobs | None]:
        """The next token, and its log-probabilities where they were asked for."""
        generator, logprobs = self._generator, None
        if self.is_runtimes:
            logits = generator.get_logits()[0, -1] if self.request.logprobs is not None else None
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            if logits is not None:
                logprobs = token_logprobs(logits, token, self.request.logprobs or 0)
            return token, logprobs
        if self._chosen is not None:
            generator.append_tokens(np.array([self._chosen], np.int32))
        self._chosen, logprobs = self._choice.choose(generator.get_logits()[0, -1])
        return self._chosen, logprobs

    def __repr__(self) -> str:
        return f"<GenaiSequence {self.made} of {self.request.max_tokens} tokens, {self.prefilled} prefilled>"


class OnnxGenerativeEngine:
    """One ONNX file with its weights and `genai_config.json` beside it, and the tokenizer where schemas are used.

    Args:
        limits: what is set there goes before the artefact's own.
        threads: threads within one operator; 0 takes as many as there are cores.
        device: "cpu" or "auto".

    Raises:
        EngineError: there is no such device, or onnxruntime-genai refuses the artefact.
    """

    def __init__(
        self, artefact: Path, *, limits: GenerationLimits = NO_LIMITS, threads: int = 1, device: str = "cpu"
    ) -> None:
        if device not in ("cpu", "auto"):
            raise EngineError(f"{artefact}: onnxruntime-genai computes on the processor here: device {device!r} is not")
        if not artefact.is_file():
            raise EngineError(f"{artefact}: there is no such artefact")
        self.artefact = artefact
        config = read_genai_config(artefact)
        self._slots = limits.slots or DEFAULT_SLOTS
        self._context = min(limits.context or config.model.context_length, config.model.context_length)
        self._vocabulary_size = min(limits.vocabulary_size or config.model.vocab_size, config.model.vocab_size)
        self._stop_tokens = frozenset(limits.stop_tokens or config.stop_tokens)
        token_bytes = config.cache_bytes
        self._cache_tokens = limits.cache_bytes // token_bytes if limits.cache_bytes else self._slots * self._context
        if self._cache_tokens < 2:
            raise EngineError(
                f"{artefact.name}: a token's attention cache is {token_bytes} bytes, and {limits.cache_bytes} are given"
            )
        self._sequences: dict[int, GenaiSequence] = {}
        self._model = _load(artefact, threads, sorted(self._stop_tokens))

    @property
    def slots(self) -> int:
        return self._slots

    def begin(self, id: int, request: GenerateRequest) -> None:
        self._refuse(request)
        cache_tokens = min(len(request.prompt) + request.max_tokens, self._context)
        if cache_tokens > self._cache_tokens:
            raise EngineError(
                f"prompt and max_tokens together are {cache_tokens} tokens: the attention cache of "
                f"{self.artefact.name} has room for {self._cache_tokens} here; ask for fewer max_tokens"
            )
        stop_tokens = frozenset() if request.ignore_stop else self._stop_tokens | frozenset(request.stop_tokens)
        sequence = GenaiSequence(request, cache_tokens, stop_tokens, TokenChoice(request, self._stop_tokens))
        if all(one.has_begun for one in self._sequences.values()) and self._has_room(sequence):
            sequence.begin(self._new_generator(sequence))
        self._sequences[id] = sequence

    def step(self, due: Sequence[int]) -> list[SequenceProgress]:
        """A chunk of a prompt, or one token, of the first sequence that is not waiting for room. Blocks."""
        for id in due:
            sequence = self._sequences[id]
            try:
                if not sequence.has_begun and self._is_next(id) and self._has_room(sequence):
                    sequence.begin(self._new_generator(sequence))
                if sequence.has_begun:
                    return self._advance(id, sequence)
            except Exception as error:  # the runtime raises RuntimeError for all there is
                del self._sequences[id]
                return [self._failed(id, sequence, error)]
        clock.block_until(clock.now() + _LOOK_AGAIN_S)
        return []

    def cancel(self, id: int) -> None:
        self._sequences.pop(id, None)

    def _failed(self, id: int, sequence: GenaiSequence, error: Exception) -> SequenceProgress:
        words = str(error)
        if not sequence.request.schema or not any(one in words for one in _OF_GRAMMARS):
            return SequenceProgress(id, error=str(failure_of(error, f"{self.artefact.name} failed")))
        reason = words.partition("\n")[0][:_MAX_REASON]  # behind it is the state of the grammar's parser
        return SequenceProgress(
            id, error=f"{self.artefact.name} cannot follow this `json_schema`: {reason}", refused=True
        )

    def _refuse(self, request: GenerateRequest) -> None:
        """Raise EngineError for what cannot be computed, whatever else there is."""
        check_prompt(
            self.artefact.name,
            request.prompt,
            free_slots=self._slots - len(self._sequences),
            slots=self._slots,
            context=self._context,
            vocabulary_size=self._vocabulary_size,
        )
        if request.schema and request.ignore_stop:
            raise EngineError("a text that follows a JSON schema ends with it: leave `ignore_eos` or `json_schema` out")
        # The runtime chooses then, and has no such option; the likeliest token is never left out by it.
        if request.schema and request.sampling.min_p and not is_greedy(request.sampling):
            raise EngineError("a text that follows a JSON schema is chosen without `min_p` here: leave one of them out")

    def _is_next(self, id: int) -> bool:
        """Whether it is the first of those that wait for room."""
        return next((one for one, sequence in self._sequences.items() if not sequence.has_begun), None) == id

    def _has_room(self, sequence: GenaiSequence) -> bool:
        held = sum(one.cache_tokens for one in self._sequences.values() if one.has_begun)
        return held + sequence.cache_tokens <= self._cache_tokens

    def _new_generator(self, sequence: GenaiSequence) -> Any:
        """Raises EngineError."""
        request = sequence.request
        parameters = onnxruntime_genai.GeneratorParams(self._model)
        try:
            parameters.set_search_options(**self._search_options(sequence))
            if request.schema:
                parameters.set_guidance("json_schema", request.schema)
            return onnxruntime_genai.Generator(self._model, parameters)
        except Exception as error:  # as above
            what = "cannot follow this `json_schema`" if request.schema else "cannot begin this sequence"
            raise failure_of(error, f"{self.artefact.name} {what}") from error

    def _search_options(self, sequence: GenaiSequence) -> dict[str, Any]:
        """What the runtime takes; what the artefact's own search says is replaced as well."""
        request, sampling = sequence.request, sequence.request.sampling
        options: dict[str, Any] = {
            "max_length": sequence.cache_tokens,
            "min_length": sequence.cache_tokens if request.ignore_stop else 0,  # no stop token before it
            "num_beams": 1,
            "num_return_sequences": 1,
            "repetition_penalty": 1.0,
            "no_repeat_ngram_size": 0,
            "do_sample": False,
        }
        if sequence.is_runtimes and not is_greedy(sampling):
            whole = self._vocabulary_size
            top_k = sampling.top_k if 0 < sampling.top_k < whole else 0
            options |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
            options["top_k"] = top_k or (whole if sampling.top_p < 1.0 else 0)  # why: above
            if sampling.seed is not None:
                options["random_seed"] = sampling.seed % 2**31  # a C int there; -1 is chance
        return options

    def _advance(self, id: int, sequence: GenaiSequence) -> list[SequenceProgress]:
        if not sequence.prefill():
            return []
        token, logprobs = sequence.next_token()
        if token in sequence.stop_tokens:
            del self._sequences[id]
            return [SequenceProgress(id, finished="stop", stop_token=True)]
        batch = _batch(sequence, token, logprobs)
        sequence.made += 1
        finished: FinishReason | None = None
        if sequence.made >= sequence.request.max_tokens or sequence.prefilled + sequence.made >= self._context:
            finished = "length"
            del self._sequences[id]
        return [SequenceProgress(id, batch, finished=finished)]

    def __repr__(self) -> str:
        return f"<OnnxGenerativeEngine {self.artefact.name} {len(self._sequences)} of {self._slots} slots>"


def _load(artefact: Path, threads: int, stop_tokens: list[int]) -> Any:
    """The model. Raises EngineError."""
    onnxruntime_genai.disable_telemetry_events()  # where it was imported before the environment said so
    session = {"intra_op_num_threads": max(0, threads), "session.intra_op.allow_spinning": "0"}
    ours = {"model": {"decoder": {"session_options": session}, "eos_token_id": stop_tokens}}
    try:
        config = onnxruntime_genai.Config(str(artefact.parent))
        config.overlay(json.dumps(ours))
        return onnxruntime_genai.Model(config)
    except Exception as error:  # as above
        raise failure_of(error, f"{artefact}: onnxruntime-genai cannot load it") from error


def _batch(sequence: GenaiSequence, token: int, logprobs: TokenLogprobs | None) -> TokenBatch:
    if logprobs is None:
        return TokenBatch(sequence.made, (token,))
    logprob, top = logprobs
    return TokenBatch(sequence.made, (token,), (logprob,), (top,) if top else ())
