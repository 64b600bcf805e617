"""Continuous batching by transformers: generation in the pool, many sequences in each step, on a processor or a GPU.

transformers' manager brings the scheduler, the paged attention cache with shared prefixes, and the batches. It is made
for a thread of its own; here it is stepped in the worker's thread by its own parts, which is what that thread does, so
there is no second thread, nothing turns while no sequence is there, and what is cancelled is gone before the next step.
A step is one forward pass: a token of each sequence, and chunks of prompts beside them.

What it leaves to us is the choice of tokens (`sequence_sampler.py`): its own is one for all sequences.

    greedy            as transformers' own `generate` on the same weights, as far as another shape of the same product
                      rounds to the same. Of SmolLM2's answers to 64 prompts, 64 tokens at most, 16 at a time, all were
                      the same in fp32, and in bf16 28: the others part where the two likeliest tokens are equal or two
                      steps of bf16 apart. So in bf16 a text may depend on its company, unless the manifest has
                      `batch_invariant` (`batch_invariance.py`): then all 64 are the same, for more time
    a pause           is not possible: a sequence that is not due goes on with the others, and its tokens wait in
                      `tidegate/workers/generation/sequence_loop.py`
    urgency           is not looked at: sequences begin in their order
    a full cache      the sequence that began last gives way, and is computed again later from its tokens
    JSON schemas      are refused
    prefixes          are shared by prompts with the same `cache_salt` (`salted_prefixes.py`)

The attention cache has `cache_bytes`, or room for all slots at once with `DEFAULT_CACHE_TOKENS` each, and for one whole
context: what its host's queue counts with where nobody says (`limits.py`). One sequence may have all of it and no more.
Weights are read from safetensors, which hold no code; code that a configuration names is not run.

It can be wrong where transformers' parts change: they have no stable interface, so its version is pinned.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from tidegate.engines.errors import EngineError, failure_of
from tidegate.engines.generation.batch_invariance import BatchInvariance
from tidegate.engines.generation.limits import DEFAULT_CACHE_TOKENS, NO_LIMITS, GenerationLimits
from tidegate.engines.generation.prompt_check import check_prompt
from tidegate.engines.generation.salted_prefixes import SaltedPrefixes
from tidegate.engines.generation.sequence_sampler import SequenceSampler
from tidegate.engines.generation.token_choice import TokenChoice, TokenLogprobs
from tidegate.engines.staging import CudaMeter
from tidegate.engines.torch_device import device_of, say_if_emulated
from tidegate.generate.engine import SequenceProgress
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import FinishReason
from tidegate.models.array_files import UnsafeArrayFile, check_safetensors
from tidegate.token_sink import TokenBatch

WEIGHTS: Final = "model.safetensors"
DEFAULT_SLOTS: Final = 16
_PAGE_TOKENS: Final = 32  # of the cache; prefixes are shared in whole pages
_DEFAULT_CONTEXT: Final = 1024  # where neither the limits nor the artefact name one
_STEP_TOKENS: Final = {"cpu": 256, "cuda": 2048}  # of prompts and sequences in one step
_WHOLE_STEP_TOKENS: Final = 1024  # the least, where a prompt is computed in one step


class BatchedSequence:
    """One sequence, as its host sees it."""

    __slots__ = ("cached_tokens", "id", "made", "request", "stop_tokens")

    def __init__(self, id: int, request: GenerateRequest, stop_tokens: frozenset[int]) -> None:
        self.id = id
        self.request = request
        self.stop_tokens = stop_tokens
        self.cached_tokens: int | None = None  # None: it has not been scheduled
        self.made = 0

    def batch(self, ids: list[int], logprobs: list[TokenLogprobs]) -> TokenBatch:
        """Its next tokens, with the log-probabilities that were kept when they were chosen."""
        first, self.made = self.made, self.made + len(ids)
        if self.request.logprobs is None:
            return TokenBatch(first, tuple(ids))
        kept = logprobs[: len(ids)]
        top = tuple(likeliest for _, likeliest in kept) if self.request.logprobs else ()
        return TokenBatch(first, tuple(ids), tuple(logprob for logprob, _ in kept), top)

    def __repr__(self) -> str:
        return f"<BatchedSequence {self.made} of {self.request.max_tokens} tokens>"


class ContinuousBatchingEngine:
    """A `model.safetensors` with its `config.json` beside it.

    Args:
        limits: what is set there goes before the artefact's own.
        threads: threads within one operator, set for the whole process; 0 leaves torch's choice, all cores.
        device: "cpu", "cuda", "cuda:1" or "auto" (CUDA where there is one).

    Raises:
        EngineError: torch does not see the device, transformers refuses the artefact, or the cache has no room.
    """

    def __init__(
        self, artefact: Path, *, limits: GenerationLimits = NO_LIMITS, threads: int = 1, device: str = "cpu"
    ) -> None:
        self.artefact = artefact
        if threads > 0:
            torch.set_num_threads(threads)
        chosen = device_of(device)
        self._model = load_causal_model(artefact, chosen)
        config = self._model.config
        self._slots = limits.slots or DEFAULT_SLOTS
        longest = getattr(config, "max_position_embeddings", 0) or limits.context or _DEFAULT_CONTEXT
        self._context = min(limits.context or longest, longest)
        self._vocabulary_size = min(limits.vocabulary_size or config.vocab_size, config.vocab_size)
        self._stop_tokens = frozenset(limits.stop_tokens or _ids(config.eos_token_id))
        tokens = max(self._context, self._slots * min(self._context, DEFAULT_CACHE_TOKENS))
        pages = _pages(config, self._model.dtype, limits.cache_bytes, tokens)
        self._sampler = SequenceSampler()
        self._sequences: dict[str, BatchedSequence] = {}  # by names of transformers', which never come twice
        self._names: dict[int, str] = {}
        self._counted = itertools.count()
        self._step_tokens = max(_STEP_TOKENS.get(chosen.type, 256), self._slots)
        if limits.batch_invariant:
            self._step_tokens = max(self._step_tokens, _WHOLE_STEP_TOKENS, 2 * self._slots)
        self._whole_prompts = limits.batch_invariant
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()  # whose prompts are to be computed in one step
        self._split = ""  # a sequence whose prompt is longer than that, until it has a token
        try:
            self._manager = _manager(
                self._model, self._sampler, pages, self._slots, self._step_tokens, shares=not limits.batch_invariant
            )
            if limits.batch_invariant:
                BatchInvariance(self._model)
        except EngineError:
            raise
        except Exception as error:  # the device's memory, and what transformers does not batch
            raise failure_of(error, f"{artefact}: transformers cannot batch it") from error
        self.processor: Any = self._manager.batch_processor  # transformers' scheduler, cache and batch
        self._prefixes = SaltedPrefixes(self.processor.cache)
        self._cache_tokens = pages * _PAGE_TOKENS
        self.device_meter = CudaMeter(chosen) if chosen.type == "cuda" else None

    @property
    def slots(self) -> int:
        return self._slots

    def begin(self, id: int, request: GenerateRequest) -> None:
        self._refuse(request)
        stop_tokens = frozenset() if request.ignore_stop else self._stop_tokens | frozenset(request.stop_tokens)
        name = self._names[id] = str(next(self._counted))
        self._sampler.begin(name, TokenChoice(request, self._stop_tokens))
        self._sequences[name] = BatchedSequence(id, request, stop_tokens)
        self._prefixes.begin(name, request.cache_salt)
        asked = {
            "input_ids": list(request.prompt),
            "max_new_tokens": min(request.max_tokens, self._context - len(request.prompt)),
            "streaming": True,
            "eos_token_id": sorted(stop_tokens),
        }
        if self._whole_prompts:
            self._waiting.append((name, asked))
        else:
            self._manager.add_request(request_id=name, **asked)

    def step(self, due: Sequence[int]) -> list[SequenceProgress]:
        """One forward pass for all sequences, whether due or not. Blocks. Raises EngineError."""
        self._let_begin()
        try:
            if self.processor.prepare_next_batch():
                self._note_cached()
                self.processor._generation_step(self._model)
                self.processor.update_batch()
        except Exception as error:  # torch raises many classes, most of them RuntimeError
            self.processor.fail_all_requests(error)
            self._forget_all()
            raise failure_of(error, f"{self.artefact.name}: transformers cannot run it") from error
        return [progress for output in self._outputs() if (progress := self._progress(output)) is not None]

    def cancel(self, id: int) -> None:
        """Nothing more comes of it; its pages are free before the next step."""
        if (name := self._names.get(id)) is not None:
            self._end(name)
            if any(waiting == name for waiting, _ in self._waiting):
                self._waiting = deque(one for one in self._waiting if one[0] != name)
            else:
                self._manager.cancel_request(name)

    def _let_begin(self) -> None:
        """Give transformers the prompts that fit into the next step beside a token of each sequence, in their order.

        One that is longer than a step is computed in parts: what comes after it waits until it is through.
        """
        if (split := self._sequences.get(self._split)) is not None and not split.made:
            return
        room = self._step_tokens - (len(self._sequences) - len(self._waiting))
        while self._waiting:
            name, asked = self._waiting[0]
            length = len(asked["input_ids"])
            if length > room:
                if length <= self._step_tokens - self._slots or room < self._step_tokens - self._slots:
                    return
                self._split = name
            self._waiting.popleft()
            self._manager.add_request(request_id=name, **asked)
            room -= length

    def _refuse(self, request: GenerateRequest) -> None:
        """Raise EngineError for what cannot be computed."""
        check_prompt(
            self.artefact.name,
            request.prompt,
            free_slots=self._slots - len(self._sequences),
            slots=self._slots,
            context=self._context,
            vocabulary_size=self._vocabulary_size,
        )
        most = min(len(request.prompt) + request.max_tokens, self._context)
        if most > self._cache_tokens:
            raise EngineError(
                f"prompt and max_tokens together are {most} tokens: the attention cache of {self.artefact.name} "
                f"has room for {self._cache_tokens} here; ask for fewer max_tokens"
            )
        if request.schema:
            raise EngineError("transformers follows no JSON schema: leave `json_schema` out, or ask for the edge")

    def _note_cached(self) -> None:
        """What the cache had of each prompt that has just been scheduled for the first time."""
        for scheduled in self.processor.inputs_and_outputs.requests_in_batch:
            sequence = self._sequences.get(scheduled.state.request_id)
            if sequence is not None and sequence.cached_tokens is None:
                sequence.cached_tokens = scheduled.state.position_offset - scheduled.query_length

    def _outputs(self) -> list[Any]:
        """What transformers has delivered."""
        queue = self._manager.output_router.output_queue
        return [queue.get_nowait() for _ in range(queue.qsize())]

    def _progress(self, output: Any) -> SequenceProgress | None:
        name = output.request_id
        sequence = self._sequences.get(name)
        if sequence is None:
            return None  # it was cancelled
        if output.error is not None:
            self._end(name)
            return SequenceProgress(sequence.id, error=f"{self.artefact.name} failed: {output.error}")
        cached = 0 if sequence.made else sequence.cached_tokens or 0
        ids = output.generated_tokens[sequence.made :]
        stopped = bool(ids) and ids[-1] in sequence.stop_tokens
        batch = sequence.batch(ids[:-1] if stopped else ids, self._sampler.take_logprobs(name))
        finished: FinishReason | None = None
        if output.is_finished():
            finished = "stop" if stopped else "length"
            self._end(name)
        return SequenceProgress(sequence.id, batch if batch.ids else None, cached, finished, stop_token=stopped)

    def _end(self, name: str) -> None:
        del self._names[self._sequences.pop(name).id]
        self._sampler.end(name)
        self._prefixes.end(name)

    def _forget_all(self) -> None:
        self._waiting.clear()
        for name in list(self._sequences):
            self._end(name)
        self._outputs()

    def __repr__(self) -> str:
        return f"<ContinuousBatchingEngine {self.artefact.name} {len(self._sequences)} of {self._slots} slots>"


def load_causal_model(artefact: Path, device: torch.device) -> Any:
    """The model in the type that its configuration names, from a folder that is trusted with data only.

    Raises:
        EngineError: naming the file and what is wrong with it.
    """
    if artefact.name != WEIGHTS:
        raise EngineError(f"{artefact}: transformers reads its weights from a file called {WEIGHTS}")
    if not artefact.is_file():
        raise EngineError(f"{artefact}: there is no such artefact")
    try:
        check_safetensors(artefact)
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(artefact.parent),
            dtype="auto",
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        say_if_emulated(artefact.parent.name, model.dtype, device)
        return model.to(device).eval()
    except ImportError:
        raise
    except UnsafeArrayFile as error:
        raise EngineError(str(error)) from error
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more
        raise failure_of(error, f"{artefact}: transformers cannot load it") from error


def _manager(model: Any, sampler: SequenceSampler, pages: int, slots: int, step_tokens: int, *, shares: bool) -> Any:
    """transformers' manager with its parts made, and no thread started. Args: shares: pages of equal prefixes."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1),  # type: ignore[no-untyped-call]
        ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=pages,
            max_batch_tokens=step_tokens,
            max_requests_per_batch=slots,
            allow_block_sharing=shares,
            max_blocks_per_request=0,  # the fast path for flash attention alone
            use_async_batching=False,  # it answers one step late
            use_cuda_graph=False,  # the sampler is no part of a graph
            auto_switch_to_flash=False,  # which may be fetched
            seed=0,  # of nothing: each sequence draws for itself
        ),
    )
    processors = manager.logit_processor
    processors.logits_processor.append(sampler)
    processors.tensors_required += 1
    processors.do_processing = True
    manager.warmup()
    return manager


def _pages(config: Any, dtype: torch.dtype, cache_bytes: int, tokens: int) -> int:
    """Pages of the attention cache. Raises EngineError where there is room for none."""
    if not cache_bytes:
        return -(-tokens // _PAGE_TOKENS)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    page_bytes = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize * _PAGE_TOKENS
    # Two more are written to by padding.
    if (pages := cache_bytes // page_bytes - 2) < 1:
        raise EngineError(f"a page of the attention cache is {page_bytes} bytes, and {cache_bytes} are given for 3")
    return int(pages)


def _ids(said: int | list[int] | None) -> tuple[int, ...]:
    if said is None:
        return ()
    return (said,) if isinstance(said, int) else tuple(said)
