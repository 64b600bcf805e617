"""Batch invariance: a sequence in a batch gets the same bits as alone, so its text does not depend on its company.

In bf16 two tokens are often equally likely to a step of rounding, and a batch rounds otherwise: sums of the same
numbers in another order. What is other in a batch of transformers', and what is done about it here:

    attention        one product over the keys of all sequences, with a mask between them: here one call for each
                     sequence, as `generate` makes it
    linear layers    kernels for one row sum otherwise than those for more: layers that do so, which is tried out when
                     the model is loaded, are computed for each sequence by itself
    prompts          a prompt in two parts, or behind pages of another's, has products of other lengths: the engine
                     computes a prompt in one step and shares no pages (`continuous_batching.py`)

All else of a decoder works on one row at a time. So greedy texts are those of transformers' own `generate`, bit for
bit: measured, `tests/bench/generate_exact.py`. Each of the three is needed.

It can be wrong where trying a layer on random rows shows no difference that there is, where a processor's threads
divide one row's sum, for a prompt that is longer than a step, and on a GPU, whose other kernels choose by the number of
rows as well: of SmolLM2's answers to 64 prompts on an H100 59 were the same, and 28 without it.

Source: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab 2025, whose kernels are of one
shape instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch.nn import Linear
from torch.nn.functional import linear

from tidegate.engines.errors import EngineError

ATTENTION: Final = "tidegate_alone"  # its name among transformers' attention functions
_TRIED_ROWS: Final = 256
_LEAST_ROWS: Final = 40
_TRIED_BYTES: Final = 2 << 30  # of weights that are read to try one shape: fewer rows of a large one
# Kernels change at some number of rows and may change back: with AMX from 33 to 255 rows of 1,536, and not with 256.
_BATCHES: Final = (2, 16, 33, 64, 100, 200, _TRIED_ROWS)
_NOT_HERE: Final = ("softcap", "position_bias", "s_aux")


class BatchInvariance:
    """Put into one model; transformers' manager for it has to be made before."""

    def __init__(self, model: Any) -> None:
        self._bounds: list[int] = [0]  # of the sequences in the step's rows
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise EngineError(f"batch_invariant: is for models with full attention, and this one has {sorted(kinds)}")
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, attend_alone)
        model.config._attn_implementation = ATTENTION  # noqa: SLF001 - its setter loads kernels
        model.register_forward_pre_hook(self._note_bounds, with_kwargs=True)
        self.divided = _shapes_that_round_otherwise(model)
        for layer in model.modules():
            if isinstance(layer, Linear) and _shape_of(layer) in self.divided:
                layer.register_forward_hook(self._each_by_itself)

    def _note_bounds(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._bounds = kwargs["cu_seq_lens_q"].tolist()

    def _each_by_itself(self, layer: Linear, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """In place of a layer's output; what was computed for all is lost."""
        rows = args[0]
        count = rows.shape[1]
        # The last layer has one row of each sequence, and the others all of them.
        bounds = self._bounds if count == self._bounds[-1] else range(count + 1)
        if len(bounds) <= 2:
            return output
        for first, end in pairwise(bounds):
            output[:, first:end] = linear(rows[:, first:end], layer.weight, layer.bias)
        return output

    def __repr__(self) -> str:
        return f"<BatchInvariance {len(self.divided)} shapes of layers are divided>"


def attend_alone(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a paged cache, sequence by sequence; an attention function of transformers'."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if any(kwargs.get(name) is not None for name in _NOT_HERE):
        raise ValueError(f"batch_invariant: is not for attention with any of {', '.join(_NOT_HERE)}")
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    asked, known = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
    found = []
    for first, end, begin, stop in zip(asked, asked[1:], known, known[1:], strict=False):
        own, keys, values = query[:, :, first:end], key[:, :, begin:stop], value[:, :, begin:stop]
        mask = _later_part(end - first, stop - begin, query.device)
        attended, _ = sdpa_attention_forward(module, own, keys, values, mask, dropout=dropout, scaling=scaling)
        found.append(attended)
    return torch.cat(found, dim=1), None


def _later_part(asked: int, known: int, device: torch.device) -> torch.Tensor | None:
    """What a later part of a prompt may look at; None where the kernel knows: of a whole prompt, and of one token."""
    if asked in (1, known):
        return None
    return torch.ones(1, 1, asked, known, dtype=torch.bool, device=device).tril(known - asked)


_Shape = tuple[int, int, torch.dtype]


def _shape_of(layer: Linear) -> _Shape:
    return layer.out_features, layer.in_features, layer.weight.dtype


def _shapes_that_round_otherwise(model: Any) -> set[_Shape]:
    """Those whose layers give a row other bits in a batch than alone: which kernel is used follows from the shape."""
    layers = {_shape_of(layer): layer for layer in model.modules() if isinstance(layer, Linear)}
    return {shape for shape, layer in layers.items() if _rounds_otherwise(layer)}


@torch.inference_mode()
def _rounds_otherwise(layer: Linear, batches: Sequence[int] = _BATCHES) -> bool:
    weight = layer.weight
    rows = max(_LEAST_ROWS, min(_TRIED_ROWS, _TRIED_BYTES // weight.nbytes))
    random = torch.Generator(weight.device).manual_seed(0)
    tried = torch.randn(rows, layer.in_features, generator=random, device=weight.device).to(weight.dtype)
    alone = torch.cat([linear(tried[at : at + 1], weight, layer.bias) for at in range(rows)])
    return any(not torch.equal(linear(part, weight, layer.bias), alone[at : at + size])
               for size in batches for at, part in _parts(tried, size))  # fmt: skip


def _parts(rows: torch.Tensor, size: int) -> list[tuple[int, torch.Tensor]]:
    return [(at, rows[at : at + size]) for at in range(0, len(rows), size)]
