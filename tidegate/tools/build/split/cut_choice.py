"""Which cuts of a graph are worth building: few, apart in work, and each the one with the fewest bytes around.

A convolutional network has some hundred cuts, of which most are as large as their neighbour, and an encoder has several
a block, all of one size. Work is counted in multiplications (convolutions and matrix products), which on one machine
are about proportional to time. The work is dealt into as many parts of equal size as cuts are wanted, and of the cuts
in a part the one with the fewest bytes is kept; of equal ones the last, behind whose activation function zeros are.

Pure. It can be wrong on a machine where memory and not multiplying is what takes time; halves are measured afterwards.
Source: Kang et al., "Neurosurgeon", ASPLOS 2017, section 3: where data shrinks early and work grows late.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from tidegate.tools.build.split.activation_codec import Shape

_LEAST_SHARE: Final = 0.01  # of the work on either side: a half that computes nothing is no half


class FoundCut(NamedTuple):
    """One cut as it was seen on example inputs."""

    tensor: str
    shape: Shape  # in lengths and names of axes
    elements: int  # of one row
    head_share: float  # of the multiplications


def chosen_cuts(found: Iterable[FoundCut], most: int) -> tuple[FoundCut, ...]:
    """At most `most` of them, the shortest head first."""
    best: dict[int, FoundCut] = {}
    for one in found:
        if not _LEAST_SHARE <= one.head_share <= 1.0 - _LEAST_SHARE:
            continue
        part = min(most - 1, int(one.head_share * most))
        known = best.get(part)
        if known is None or one.elements <= known.elements:
            best[part] = one
    return tuple(best[part] for part in sorted(best))
