"""The attention kernel of `attention.c` is compiled when an engine loads it; without a compiler torch is used instead.

Rows of unequal length are what torch's kernels for CPUs are worst at: they want rectangles, so tokens are copied there
and back, and they make many calls for little work. The kernel walks the packed rows as they lie. In µs a token over six
layers of MiniLM on one core, without those copies for torch:

    rows of           16    32    64   128   256
    torch, fp32      6.8   8.9    13    22    37
    torch, bf16      8.0   6.7   8.3    16    26
    kernel, either   2.7   3.2   4.9   8.7    16

It needs AVX-512 and a C compiler: `cc`, or what the environment's CC names (CC=none leaves it to torch). Compiling
takes half a second of each process that loads such a model, into a folder that is removed at once: a cache would be a
place where others can put code. If it is unavailable, one line in the log says why, and answers stay the same.

It has one thread, so it is used up to two of them: with more, torch's slower kernels are done earlier.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

log = logging.getLogger(__name__)  # a worker's stderr; engines know nothing of the process's own logs

_SOURCE = Path(__file__).with_name("attention.c")
_FLAGS = ("-std=gnu11", "-O3", "-march=x86-64-v4", "-shared", "-fPIC")
_COMPILES_IN_S = 60.0
_MOST_THREADS = 2
_LANES = 16  # of attention.c
_DTYPES = (torch.float32, torch.bfloat16)


class AttentionKernel:
    """The compiled function, for any number of models."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]
        self._function.restype = ctypes.c_int

    def takes(self, like: torch.Tensor, width: int) -> bool:
        """Whether it is of use for a network with weights like this and heads of this width."""
        fits = like.device.type == "cpu" and like.dtype in _DTYPES and width % _LANES == 0
        return fits and torch.get_num_threads() <= _MOST_THREADS

    def over(self, lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None, heads: int) -> partial[torch.Tensor]:
        """An `Attend` for rows of these lengths, none of them 0. `mask`: which tokens are real; None when all are."""
        lengths = np.ascontiguousarray(lengths)
        return partial(self._attend, lengths, None if mask is None else np.ascontiguousarray(mask), heads)

    def _attend(
        self, lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None, heads: int, qkv: torch.Tensor
    ) -> torch.Tensor:
        tokens = int(lengths.sum())
        # The C function does not check its arguments.
        assert qkv.is_contiguous() and qkv.dtype in _DTYPES and tokens <= len(qkv) and lengths.dtype == np.int64
        attended = torch.empty(len(qkv), qkv.shape[1] // 3, dtype=qkv.dtype)
        attended[tokens:].zero_()
        failed = self._function(
            qkv.data_ptr(),
            attended.data_ptr(),
            lengths.ctypes.data,
            None if mask is None else mask.ctypes.data,
            len(lengths),
            heads,
            attended.shape[1] // heads,
            int(qkv.dtype is torch.bfloat16),
        )
        if failed:
            raise MemoryError("no memory for attention's scratch")
        return attended

    def __repr__(self) -> str:
        return "<AttentionKernel>"


def attention_kernel() -> AttentionKernel | None:
    """The kernel for this process's CPU; None, with one line in the log, if it is unavailable. Blocks."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    return _compiled(*shlex.split(os.environ.get("CC") or "cc"))


@cache
def _compiled(compiler: str, *options: str) -> AttentionKernel | None:
    if shutil.which(compiler) is None:
        log.warning("attention runs on torch's own kernels, which are slower: there is no C compiler %r here", compiler)
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
            library = Path(folder) / "attention.so"
            command = [compiler, *options, *_FLAGS, "-o", str(library), str(_SOURCE), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILES_IN_S, stdin=subprocess.DEVNULL)
            return AttentionKernel(ctypes.CDLL(str(library)).tidegate_attend)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        why = said[0] if said else error
        log.warning(
            "attention runs on torch's own kernels, which are slower: %s cannot compile ours: %s", compiler, why
        )
        return None
