"""An engine that takes the time of a generating model, and computes nothing.

For trying out routing, deadlines, streams and faults without a model (`tidegate/engines/paced.py` is the same for
single answers). Everything around it is as in life: a worker process, slots, chunks of prompts, batches, credit,
cancellation. It is declared wherever a model is described.

The artefact is a short YAML (or JSON) file:

    prefill_ms         of a token of a prompt
    cached_prefill_ms  of one that the prefix cache has
    step_ms            points of (sequences in the batch, milliseconds) of one step
    context_us         microseconds that each token of its sequences' contexts adds to a step
    slots              sequences at a time
    context            tokens of a prompt and its answer
    prefill_chunk      tokens of prompts in one step, so that other sequences are not kept waiting
    cache_tokens       of prompts that the prefix cache remembers; 0: none
    ids                the first and the last token of its vocabulary that it says
    stop_chance        of each token, that a stop token comes in its place: answers of geometric length. The model's
                       stop tokens come in no other way
    noise_sigma        deviation of the logarithm of a step's time; its stream of chance begins anew with each load
    seed               of that chance

    a step takes  (chunk × prefill_ms + [any decodes] × (step_ms(batch) + context × context_us)) × noise × slow

Its tokens are no text: each is a checksum of all tokens before it. So two runs give the same, every paced engine with
the same `ids` gives the same, and one that is given a prompt with the tokens that another has made goes on exactly
where that one stopped. Temperature changes nothing; a seed gives another text. Its log-probabilities are 0.

It can be wrong where cores are short: a real engine would then be slower, and this one is not.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import exp, isfinite
from pathlib import Path
from random import Random
from typing import Final, Literal

import msgspec
import yaml

from tidegate import clock
from tidegate.engines.errors import EngineError
from tidegate.engines.generation.limits import NO_LIMITS, GenerationLimits
from tidegate.engines.paced import in_words, stay_until, wake_in_time
from tidegate.estimate.cost_table import CostTable
from tidegate.generate.engine import SequenceProgress
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import FinishReason
from tidegate.token_sink import TokenBatch, TopLogprob

MAX_SLOTS: Final = 4096
_BLOCK: Final = 16  # tokens of a prompt that the prefix cache knows together
_FOR_TOKENS, _FOR_STOPS = 0x9E3779B1, 0x85EBCA6B  # odd multipliers, of Knuth's hash and of MurmurHash3
_WAY_OUT: Final = "see tidegate/engines/generation/paced_generation.py for its keys"


class PacedGeneration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The contents of the artefact."""

    prefill_ms: float
    step_ms: tuple[tuple[float, float], ...]
    cached_prefill_ms: float = 0.0
    context_us: float = 0.0
    slots: int = 8
    context: int = 4096
    prefill_chunk: int = 128
    cache_tokens: int = 0
    ids: tuple[int, int] = (0, 2**31 - 1)  # as many of them as the vocabulary has
    stop_chance: float = 0.0
    noise_sigma: float = 0.0
    seed: int = 1
    schema: Literal[1] = 1


class PrefixCache:
    """The blocks of prompts that were computed last. A block is known by all tokens up to its end.

    Args:
        tokens: that it remembers.
    """

    def __init__(self, tokens: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._most = tokens // _BLOCK

    def cached(self, prompt: Sequence[int], salt: str) -> int:
        """The tokens at the beginning of a prompt that it has; never all, as the last one has to be computed."""
        found = 0
        for block in _blocks(prompt, salt) if self._most else ():
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            found += _BLOCK
        return min(found, len(prompt) - 1)

    def keep(self, prompt: Sequence[int], salt: str) -> None:
        for block in _blocks(prompt, salt) if self._most else ():
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self._blocks)} of {self._most} blocks>"


class PacedSequence:
    """One sequence: how much of its prompt is to be computed, and the checksum of its tokens."""

    __slots__ = ("cached_tokens", "context", "made", "request", "to_prefill_ms", "to_prefill_tokens", "tokens_sum")

    def __init__(self, request: GenerateRequest, cached_tokens: int, *, prefill_ms: float, cached_ms: float) -> None:
        self.request = request
        self.cached_tokens = cached_tokens
        self.to_prefill_tokens = len(request.prompt) - cached_tokens
        self.to_prefill_ms = self.to_prefill_tokens * prefill_ms + cached_tokens * cached_ms
        self.context = len(request.prompt)
        self.made = 0
        seeded = zlib.crc32(struct.pack("<q", request.sampling.seed)) if request.sampling.seed is not None else 0
        self.tokens_sum = zlib.crc32(struct.pack(f"<{self.context}i", *request.prompt), seeded)

    def say(self, token: int) -> None:
        self.tokens_sum = zlib.crc32(struct.pack("<i", token), self.tokens_sum)
        self.made += 1
        self.context += 1

    def __repr__(self) -> str:
        return f"<PacedSequence {self.made} of {self.request.max_tokens} tokens, {self.to_prefill_tokens} to prefill>"


class PacedGenerativeEngine:
    """One artefact, paced.

    Args:
        limits: what is set there goes before the artefact's own.
        slow: how many times slower this process is than the artefact says.

    Raises:
        EngineError: the artefact is not a pace; the message names the key.
    """

    def __init__(self, artefact: Path, *, limits: GenerationLimits = NO_LIMITS, slow: float = 1.0) -> None:
        self.artefact = artefact
        self.pace = read_generation_pace(artefact)
        self.slow = slow
        self._slots = limits.slots or self.pace.slots
        self._context = limits.context or self.pace.context
        first, last = self.pace.ids
        self._ids = range(first, min(last + 1, limits.vocabulary_size or last + 1))
        self._stop_tokens = frozenset(limits.stop_tokens)
        if all(one in self._stop_tokens for one in self._ids):
            raise EngineError(
                f"{artefact}: key 'ids': no token from {first} to {last} is the model's and no stop token"
            )
        self._step_ms = CostTable(self.pace.step_ms)
        self._random = Random(self.pace.seed)
        self._cache = PrefixCache(self.pace.cache_tokens)
        self._sequences: dict[int, PacedSequence] = {}
        wake_in_time()

    @property
    def slots(self) -> int:
        return self._slots

    def begin(self, id: int, request: GenerateRequest) -> None:
        if len(self._sequences) >= self._slots:
            raise EngineError(f"{self.artefact.name} has {self._slots} slots, and all are taken")
        if len(request.prompt) >= self._context:
            raise EngineError(
                f"the prompt has {len(request.prompt)} tokens, which leaves none for the answer: "
                f"{self.artefact.name} has a context of {self._context}"
            )
        if request.schema:
            raise EngineError(f"{self.artefact.name} is paced, and follows no JSON schema: leave `json_schema` out")
        cached = self._cache.cached(request.prompt, request.cache_salt)
        self._sequences[id] = PacedSequence(
            request, cached, prefill_ms=self.pace.prefill_ms, cached_ms=self.pace.cached_prefill_ms
        )

    def step(self, due: Sequence[int]) -> list[SequenceProgress]:
        """A chunk of the prompts, and one token of each sequence whose prompt is done. Blocks."""
        began_at = clock.now()
        known = [(one, self._sequences[one]) for one in due[: self._slots]]
        decoding = [(one, sequence) for one, sequence in known if not sequence.to_prefill_tokens]
        took_ms, prefilled = self._prefill([(one, sequence) for one, sequence in known if sequence.to_prefill_tokens])
        if decoding:
            context = sum(sequence.context for _, sequence in decoding)
            took_ms += self._step_ms.seconds_for(len(decoding)) + 1e-3 * context * self.pace.context_us
        progress = [self._advance(one, sequence) for one, sequence in [*decoding, *prefilled]]
        stay_until(began_at + 1e-3 * took_ms * self.slow * self._luck())
        return progress

    def cancel(self, id: int) -> None:
        self._sequences.pop(id, None)

    def _prefill(self, waiting: list[tuple[int, PacedSequence]]) -> tuple[float, list[tuple[int, PacedSequence]]]:
        """One chunk of the prompts, in order: the milliseconds, and those that are done."""
        left, took_ms, done = self.pace.prefill_chunk, 0.0, []
        for one, sequence in waiting:
            if not left:
                break
            tokens = min(left, sequence.to_prefill_tokens)
            took_ms += (part_ms := sequence.to_prefill_ms * tokens / sequence.to_prefill_tokens)
            sequence.to_prefill_ms -= part_ms
            sequence.to_prefill_tokens -= tokens
            left -= tokens
            if not sequence.to_prefill_tokens:
                self._cache.keep(sequence.request.prompt, sequence.request.cache_salt)
                done.append((one, sequence))
        return took_ms, done

    def _advance(self, id: int, sequence: PacedSequence) -> SequenceProgress:
        request = sequence.request
        cached = 0 if sequence.made else sequence.cached_tokens
        token = self._next(sequence)
        if token is None or (token in request.stop_tokens and not request.ignore_stop):
            del self._sequences[id]
            return SequenceProgress(id, None, cached, "stop", stop_token=True)
        at = sequence.made
        sequence.say(token)
        finished: FinishReason | None = None
        if sequence.made >= request.max_tokens or sequence.context >= self._context:
            finished = "length"
            del self._sequences[id]
        return SequenceProgress(id, _batch(at, token, request.logprobs), cached, finished)

    def _next(self, sequence: PacedSequence) -> int | None:
        """Its next token; None where a stop token comes instead."""
        if not sequence.request.ignore_stop and _mixed(sequence.tokens_sum, _FOR_STOPS) < self.pace.stop_chance * 2**32:
            return None
        at = _mixed(sequence.tokens_sum, _FOR_TOKENS) % len(self._ids)
        while (token := self._ids[at]) in self._stop_tokens:
            at = (at + 1) % len(self._ids)
        return token

    def _luck(self) -> float:
        return exp(self._random.gauss(0.0, self.pace.noise_sigma)) if self.pace.noise_sigma else 1.0

    def __repr__(self) -> str:
        return f"<PacedGenerativeEngine {self.artefact.name} {len(self._sequences)} of {self._slots} slots>"


def read_generation_pace(path: Path) -> PacedGeneration:
    """The contents of the file. Raises EngineError, naming the file, the key and the way out."""
    try:
        pace = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), PacedGeneration)
    except FileNotFoundError as error:
        raise EngineError(f"{path}: there is no such artefact") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EngineError(f"{path}: is no readable YAML: {error}; {_WAY_OUT}") from error
    except msgspec.ValidationError as error:
        raise EngineError(f"{path}: {in_words(str(error))}; {_WAY_OUT}") from error
    for key, why in _misfits(pace):
        raise EngineError(f"{path}: key {key!r}: {why}; {_WAY_OUT}")
    return pace


def _misfits(pace: PacedGeneration) -> Iterator[tuple[str, str]]:
    try:
        CostTable(pace.step_ms)
    except ValueError as error:
        yield "step_ms", str(error)
    for key in ("prefill_ms", "cached_prefill_ms", "context_us"):
        if not (isfinite(value := getattr(pace, key)) and value >= 0.0):
            yield key, f"must be 0 or more, not {value:g}"
    if not 1 <= pace.slots <= MAX_SLOTS:
        yield "slots", f"must be from 1 to {MAX_SLOTS}, not {pace.slots}"
    for key, least in (("context", 2), ("prefill_chunk", 1), ("cache_tokens", 0)):
        if getattr(pace, key) < least:
            yield key, f"must be {least} or more, not {getattr(pace, key)}"
    if not 0 <= pace.ids[0] <= pace.ids[1] < 2**31:
        yield "ids", f"must be the first and the last of a vocabulary, not {pace.ids[0]} and {pace.ids[1]}"
    if not 0.0 <= pace.stop_chance <= 1.0:
        yield "stop_chance", f"must be from 0 to 1, not {pace.stop_chance:g}"
    if not 0.0 <= pace.noise_sigma <= 2.0:
        yield "noise_sigma", f"must be from 0 to 2, not {pace.noise_sigma:g}"


def _batch(at: int, token: int, logprobs: int | None) -> TokenBatch:
    if logprobs is None:
        return TokenBatch(at, (token,))
    return TokenBatch(at, (token,), (0.0,), ((TopLogprob(token, 0.0),),) if logprobs else ())


def _blocks(prompt: Sequence[int], salt: str) -> Iterator[int]:
    """A number for each whole block, of all tokens up to its end."""
    number = hash(salt)
    for at in range(0, len(prompt) - _BLOCK + 1, _BLOCK):
        number = hash((number, *prompt[at : at + _BLOCK]))
        yield number


def _mixed(checksum: int, multiplier: int) -> int:
    """A number of 32 bits that looks like chance. A checksum is none: that of its own bytes is always the same."""
    mixed = (checksum ^ checksum >> 15) * multiplier % 2**32
    return mixed ^ mixed >> 13
