"""CUDA graphs of one network, one for each shape: recorded when a shape comes again, and replayed from then on.

A small encoder is some hundred kernels, and launching each costs the processor more than it costs the GPU to run it. A
graph launches all of them at once. It is fixed to its shapes and to the memory that it was recorded with: the input is
copied into that memory, and the answer is read from it before the next call. All graphs share one pool of memory, since
only one of them runs at a time.

Recording takes some ten milliseconds, so a shape has to come a second time first. Without memory for it, or where the
driver refuses, calls go on without graphs, and one line in the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

log = logging.getLogger(__name__)  # a worker's stderr; engines know nothing of the process's own logs

MOST_GRAPHS: Final = 128
_COMES_AGAIN: Final = 2  # calls of a shape before it is recorded

Shape = TypeVar("Shape", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Recorded:
    graph: Any  # torch.cuda.CUDAGraph
    pinned: torch.Tensor
    given: torch.Tensor
    answer: torch.Tensor


class GraphReplay(Generic[Shape]):
    """For one thread.

    Args:
        forward: computes a shape's answer from its input on the device, by kernels alone: what it asks of the
            processor is recorded as it was the first time.
        device: a CUDA device.
        most: graphs; further shapes are computed without.
    """

    def __init__(
        self, forward: Callable[[Shape, torch.Tensor], torch.Tensor], device: torch.device, *, most: int = MOST_GRAPHS
    ) -> None:
        self._forward = forward
        self._device = device
        self._most = most
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._seen: dict[Shape, int] = {}
        self._recorded: dict[Shape, Recorded] = {}
        self.held_bytes = 0  # of the device, by the graphs' pool

    def __call__(self, shape: Shape, flat: NDArray[np.int32]) -> NDArray[np.float32]:
        """The answer for a shape's input. Blocks until it is there. Raises what torch raises."""
        with torch.cuda.stream(self._stream):
            known = self._recorded.get(shape)
            if known is not None:
                np.copyto(known.pinned.numpy(), flat)
                known.given.copy_(known.pinned, non_blocking=True)
                known.graph.replay()
                return known.answer.cpu().numpy()
            answer = self._forward(shape, torch.from_numpy(flat).to(self._device)).cpu().numpy()
            self._note(shape, flat)
        return answer

    def _note(self, shape: Shape, flat: NDArray[np.int32]) -> None:
        if len(self._recorded) >= self._most:
            return
        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if seen < _COMES_AGAIN:
            return
        before = torch.cuda.memory_reserved(self._device)
        try:
            self._recorded[shape] = self._record(shape, flat)
        except Exception as error:  # the driver's own, of many classes; the answer is there already
            self._most = 0
            log.warning("CUDA graphs are not used any more: %s: %s", type(error).__name__, error)
        self.held_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)

    def _record(self, shape: Shape, flat: NDArray[np.int32]) -> Recorded:
        pinned = torch.from_numpy(flat).pin_memory()
        given = pinned.to(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # Another thread may pin memory meanwhile, which only recording for all threads would forbid.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            answer = self._forward(shape, given)
        finally:
            graph.capture_end()
        return Recorded(graph, pinned, given, answer)

    @property
    def recorded(self) -> int:
        return len(self._recorded)

    def __repr__(self) -> str:
        return f"<GraphReplay on {self._device}, {len(self._recorded)} shapes recorded>"
