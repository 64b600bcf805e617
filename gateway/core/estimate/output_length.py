"""Output lengths are learned as a distribution: how many tokens an answer will have, by model, tenant and `max_tokens`.

How long a generation takes is decided by a number that nobody knows when it is placed. It is heavy-tailed: half of a
model's answers have some dozen tokens and one in a hundred a thousand, so a mean says little, and `max_tokens`, which
callers leave high, says less. What is kept here is a histogram with bins a third of an octave wide, and read as
`QUANTILES` lengths of equal weight, none above `max_tokens`.

Many answers are seen in part only: their caller left, or `max_tokens` cut them. Left out they would make answers look
short, counted as ends they would too. So each bin has its hazard, the chance that an answer which has come so far ends
in it, and a cut answer counts among those that came so far and not among those that ended:

    hazard of a bin = (ended in it + PRIOR · hazard of the wider group) / (came so far + PRIOR)
    share that is longer = Π (1 − hazard)      over the bins before

`came so far` has those cut inside of the bin by half, as life tables do. The groups widen from (model, tenant, class of
`max_tokens`) to (model, class) to the model and to a prior, a log-logistic distribution, whose tail is a power's: where
nobody was seen, in the far tail of every group, the next wider one speaks. Evidence decays by the answer, with a memory
of some `MEMORY` of them.

It can be wrong where callers leave for what they have read: they end what would have been long, or are content with
what is short, and cutting is then no accident. Invariants: every length and the mean lie from 1 to `max_tokens`,
whatever was recorded; at most `MOST_GROUPS` groups, the least recently used goes first; no chance is involved. O(1) to
record, O(bins) for the first reading after `REFRESH_EVERY` answers.

Source: Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", JASA 1958; Cutler and Ederer,
"Maximum Utilization of the Life Table Method", J. Chronic Diseases 1958 (half of those cut count as at risk). That
outputs are heavy-tailed, and are better predicted as a distribution than as a number: arXiv 2604.00499.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from itertools import pairwise
from math import ceil
from typing import Final, NamedTuple

from tidegate.models.generative import MAX_CONTEXT

QUANTILES: Final = 8
MEMORY: Final = 500.0  # answers
MOST_GROUPS: Final = 2048
PRIOR: Final = 4.0  # imaginary answers that came so far, of the wider group's hazard
REFRESH_EVERY: Final = 4  # answers: a curve costs as much as several predictions
_PER_OCTAVE: Final = 3
_USUAL_TOKENS: Final = 128.0  # the prior's median: of an answer to a question, about a paragraph
_TAIL: Final = 1.3  # the prior's exponent: one in a hundred has more than 34 times the median
_LARGEST: Final = 1e12  # of a weight, before all are scaled down

# The first length of each bin: 1, 2, 3, 4, 6, 7, 8, 11, 13, 16, …
STARTS: Final = tuple(
    sorted({ceil(2.0 ** (k / _PER_OCTAVE)) for k in range(_PER_OCTAVE * MAX_CONTEXT.bit_length() + 1)})
)
_BINS: Final = len(STARTS)


class LengthForecast(NamedTuple):
    """What is known of an answer's length before it begins, in tokens; `lengths` are equally likely, and rise."""

    lengths: tuple[float, ...]
    mean: float


def certain_length(tokens: int) -> LengthForecast:
    """The forecast of an answer whose length is settled: no token ends it."""
    return LengthForecast((float(tokens),), float(tokens))


def _prior_hazards() -> array[float]:
    longer = [1.0 / (1.0 + ((start - 0.5) / _USUAL_TOKENS) ** _TAIL) for start in STARTS]
    # The last bin ends everything.
    return array("d", [1.0 - after / before for before, after in pairwise(longer)] + [1.0])


_PRIOR_HAZARDS: Final = _prior_hazards()


class _LengthGroup:
    """Mutable: the answers of one group, by bin: those that ended in it, and those that were cut in it."""

    __slots__ = ("_cut", "_ended", "_forecasts", "_since", "_weight", "hazards")

    def __init__(self, hazards: array[float]) -> None:
        self.hazards = hazards  # a wider group's until there are some of its own
        self._ended = array("d", bytes(8 * _BINS))
        self._cut = array("d", bytes(8 * _BINS))
        self._weight = 1.0  # of the next answer: it grows instead of the others being shrunk
        self._since = REFRESH_EVERY
        self._forecasts: dict[int, LengthForecast] = {}

    def record(self, tokens: int, *, ended: bool) -> None:
        place = bisect_right(STARTS, tokens) - 1
        (self._ended if ended else self._cut)[max(0, min(_BINS - 1, place))] += self._weight
        self._weight *= 1.0 + 1.0 / MEMORY
        self._since += 1
        if self._weight > _LARGEST:
            for counts in (self._ended, self._cut):
                for at, count in enumerate(counts):
                    counts[at] = count / self._weight
            self._weight = 1.0

    def refresh(self, wider: array[float]) -> None:
        """Work out the hazards anew where enough has come."""
        if self._since < REFRESH_EVERY:
            return
        self._since = 0
        self._forecasts.clear()
        hazards, scale, beyond = array("d", _PRIOR_HAZARDS), 1.0 / self._weight, 0.0
        for place in range(_BINS - 2, -1, -1):
            ended, cut = self._ended[place] * scale, self._cut[place] * scale
            # Those that came so far: those that went further, ended here, and half of those cut here.
            so_far = beyond + ended + 0.5 * cut
            hazards[place] = (ended + PRIOR * wider[place]) / (so_far + PRIOR)
            beyond += ended + cut
        self.hazards = hazards

    def forecast(self, max_tokens: int) -> LengthForecast:
        known = self._forecasts.get(max_tokens)
        if known is None:
            if len(self._forecasts) >= 16:  # a caller may name any number
                self._forecasts.clear()
            known = self._forecasts[max_tokens] = _forecast(self.hazards, max_tokens)
        return known


class OutputLengths:
    """Mutable: `record` each answer at its end, `forecast` the next one's length."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[str, str, int], _LengthGroup] = OrderedDict()

    def record(self, model: str, tenant: str, max_tokens: int, tokens: int, *, ended: bool) -> None:
        """Take in an answer.

        Args:
            tokens: how many it had; an answer without one teaches nothing.
            ended: False where it was cut: by `max_tokens`, or since its caller left.
        """
        if tokens < 1:
            return
        for group in self._chain(model, tenant, max_tokens):
            group.record(tokens, ended=ended)

    def forecast(self, model: str, tenant: str, max_tokens: int) -> LengthForecast:
        """How long an answer will be."""
        wider = _PRIOR_HAZARDS
        group = None
        for group in self._chain(model, tenant, max_tokens):
            group.refresh(wider)
            wider = group.hazards
        assert group is not None
        return group.forecast(max(1, max_tokens))

    def _chain(self, model: str, tenant: str, max_tokens: int) -> tuple[_LengthGroup, ...]:
        """The groups of such a request, the widest first."""
        class_ = _class_of(max_tokens)
        return self._group((model, "", 0)), self._group((model, "", class_)), self._group((model, f"/{tenant}", class_))

    def _group(self, key: tuple[str, str, int]) -> _LengthGroup:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _LengthGroup(_PRIOR_HAZARDS)
            if len(self._groups) > MOST_GROUPS:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(key)
        return group

    def __len__(self) -> int:
        return len(self._groups)

    def __repr__(self) -> str:
        return f"<OutputLengths of {len(self._groups)} groups>"


def _class_of(max_tokens: int) -> int:
    """The power of four that `max_tokens` reaches, from 1: callers who ask for about as much."""
    return 1 + (max(1, max_tokens).bit_length() - 1) // 2


def _forecast(hazards: array[float], max_tokens: int) -> LengthForecast:
    lengths: list[float] = []
    longer, mean = 1.0, 0.0  # the share that is at least as long as the bin's start
    for place, start in enumerate(STARTS):
        if start >= max_tokens:
            break
        end = STARTS[place + 1] if place + 1 < _BINS else start + 1
        left = longer * (1.0 - hazards[place])
        while len(lengths) < QUANTILES and left < (want := 1.0 - (len(lengths) + 0.5) / QUANTILES):
            # Inside of a bin the ends are spread evenly.
            share = (longer - want) / (longer - left)
            lengths.append(min(float(max_tokens), max(1.0, start + share * (end - start) - 0.5)))
        covered = min(end, max_tokens)  # mean = Σ P(length >= n), n from 1; within the bin it falls evenly
        falls = (longer - left) * (covered - start) / (end - start)
        mean += (covered - start) * (longer - 0.5 * falls)
        longer = left
    mean += longer  # the last token that it may have
    lengths += [float(max_tokens)] * (QUANTILES - len(lengths))
    return LengthForecast(tuple(lengths), min(float(max_tokens), max(1.0, mean)))
