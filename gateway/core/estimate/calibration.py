"""Calibration compares predicted chances with outcomes, and shifts the next prediction accordingly.

A chance computed from models of link, queue and compute is wrong in ways that repeat: a queue in which tighter requests
jump ahead makes it too sure, an overloaded fleet makes it far too low (docs/design/routing.md, "Chance and
calibration": 0.04 said, 0.45 came). Those errors depend mostly on the chance itself, so predictions are sorted into 20
bins by what was said, and each bin remembers, with decay, what was said and what came. The calibrated chance is

    said + shift(said),  shift of a bin = Σ(came − said) / (weight + 8)      eight imaginary calls in which it was right

interpolated between the bins' centres after they were made monotone (pool adjacent violators). Each bin lends a
quarter of its evidence to its neighbours: errors do not end at a bin's edge, interpolation does. Shifting instead of
replacing keeps the order within a bin: 0.999 stays above 0.96, and placement lives off such differences.

`ReliabilityBins` measures: its `ece` is the mean gap between said and came, weighted by how often it was said.
`Calibration` corrects: one for the raw chances, and one measured on what it said itself, which is the figure to show.
`Prediction` is one claim under way; it is settled once, when its attempt ends.

An attempt that was given up before its deadline settles nothing: whether it would have come is not known. That makes
the correction slightly too kind to targets that are often hedged.

Invariants: a calibrated chance is in [0, 1] and does not fall when the raw one rises.
Source: docs/design/routing.md, "Chance and calibration" (20 bins, 0.997, prior weight 8); Zadrozny and Elkan,
"Transforming Classifier Scores into Accurate Multiclass Probability Estimates", KDD 2002.
"""

from __future__ import annotations

from math import exp, sqrt
from typing import Final, NamedTuple

BINS: Final = 20
_KEEP: Final = 0.997  # of a bin's memory, at each of its records: some 300 of them
_PRIOR_WEIGHT: Final = 8.0
_LENT: Final = 0.25  # of a bin's evidence, to each neighbour
_REFRESH_EVERY: Final = 8  # records; a curve costs as much as several predictions
_EARLY_S: Final = 0.001  # a timer may ring this early
_KEEP_OWN: Final = 0.95  # of a target's own account, at each of its records: some 20 of them
_OWN_MEMORY_S: Final = 10.0
_STANDARD_ERRORS: Final = 2.0

Curve = tuple[float, ...]  # the calibrated chance at each bin's centre
CENTRES: Final[Curve] = tuple((index + 0.5) / BINS for index in range(BINS))
_LAST_CENTRE: Final = CENTRES[-1]


class ReliabilityBins:
    """Mutable: `record` what was said and whether it came; read per bin, or as one figure."""

    __slots__ = ("_came", "_said", "_weight")

    def __init__(self) -> None:
        self._weight = [0.0] * BINS
        self._said = [0.0] * BINS
        self._came = [0.0] * BINS

    def record(self, said: float, came: float) -> None:
        """Args: came: whether it did; between 0 and 1 where that is known as a chance only."""
        index = min(BINS - 1, int(said * BINS))
        self._weight[index] = _KEEP * self._weight[index] + 1.0
        self._said[index] = _KEEP * self._said[index] + said
        self._came[index] = _KEEP * self._came[index] + came

    @property
    def ece(self) -> float:
        """Expected calibration error, 0 to 1: how far what was said is from what came, on average."""
        gaps = (abs(came - said) for said, came in zip(self._said, self._came, strict=True))
        return sum(gaps) / (sum(self._weight, 0.0) or 1.0)

    def bins(self) -> tuple[tuple[float, float, float], ...]:
        """(mean said, share that came, weight) of each bin that has seen anything: the reliability diagram."""
        rows = zip(self._said, self._came, self._weight, strict=True)
        return tuple((said / weight, came / weight, weight) for said, came, weight in rows if weight)

    def curve(self) -> Curve:
        """What to say at each bin's centre, monotone and within [0, 1]."""
        blocks: list[tuple[float, float, int]] = []  # (value, weight, bins), rising
        gaps = _shared_with_neighbours([came - said for said, came in zip(self._said, self._came, strict=True)])
        for centre, gap, weight in zip(CENTRES, gaps, _shared_with_neighbours(self._weight), strict=True):
            value, heft, width = centre + gap / (weight + _PRIOR_WEIGHT), weight + 1.0, 1
            while blocks and blocks[-1][0] >= value:
                other, other_heft, other_width = blocks.pop()
                value = (value * heft + other * other_heft) / (heft + other_heft)
                heft, width = heft + other_heft, width + other_width
            blocks.append((value, heft, width))
        return tuple([min(1.0, max(0.0, value)) for value, _, width in blocks for _ in range(width)])

    def __repr__(self) -> str:
        return f"<ReliabilityBins ece {self.ece:.3f} over {sum(self._weight):.0f}>"


def _shared_with_neighbours(values: list[float]) -> list[float]:
    """Each bin's value with a share of its neighbours'."""
    padded = [0.0, *values, 0.0]
    return [one + _LENT * (before + after) for before, one, after in zip(padded, values, padded[2:], strict=False)]


def apply_curve(chance: float, curve: Curve) -> float:
    """`chance`, shifted by the curve."""
    place = chance * BINS - 0.5
    if place >= BINS - 1:  # first: most chances are good
        shifted = chance + curve[-1] - _LAST_CENTRE
        return shifted if shifted < 1.0 else 1.0
    if place <= 0.0:
        shifted = chance + curve[0] - CENTRES[0]
        return shifted if shifted > 0.0 else 0.0
    index = int(place)
    return curve[index] + (place - index) * (curve[index + 1] - curve[index])


class Calibration:
    """Mutable: `record` each outcome; `curve` is immutable and safe to keep."""

    __slots__ = ("_since", "claimed", "curve", "raw", "surest")

    def __init__(self) -> None:
        self.raw = ReliabilityBins()
        self.claimed = ReliabilityBins()
        self.curve: Curve = CENTRES
        self.surest = apply_curve(1.0, CENTRES)  # the most that is ever claimed: of a raw chance of 1
        self._since = 0

    def record(self, raw: float, claimed: float, came: float) -> None:
        """A chance that was computed as `raw` and reported as `claimed`, and whether the answer came in time.

        Args:
            came: 0 or 1; between them where that is known as a chance only.
        """
        self.raw.record(raw, came)
        self.claimed.record(claimed, came)
        self._since += 1
        if self._since >= _REFRESH_EVERY:
            self.curve, self._since = self.raw.curve(), 0
            self.surest = apply_curve(1.0, self.curve)

    def __repr__(self) -> str:
        return f"<Calibration claimed {self.claimed!r} raw {self.raw!r}>"


class TargetBias:
    """Mutable: how much less often one target's claims come true than they should; 0 for a target like the others.

    The shared calibration knows in which way the model of chances errs, and never that one target has become worse. So
    each target keeps a decayed account of its own claims. Only what is beyond two standard errors of such an account
    counts, since a shift that follows chance would change the order of equal targets; and it is forgotten with time,
    since a target that is thought bad gets no requests with which to show that it is better.
    """

    __slots__ = ("_at", "_gap", "_spread2", "_weight", "shift")

    def __init__(self) -> None:
        self.shift = 0.0  # to be added to a calibrated chance; never above 0
        self._gap = 0.0  # Σ(came − claimed), decayed
        self._spread2 = 0.0  # Σ claimed · (1 − claimed): its variance, were all claims right
        self._weight = 0.0
        self._at = 0.0

    def record(self, claimed: float, came: bool, now: float) -> None:
        """A chance that was claimed for this target, and whether the answer came in time."""
        keep = _KEEP_OWN * self._left(now)
        self._gap = keep * self._gap + came - claimed
        self._spread2 = keep * self._spread2 + claimed * (1.0 - claimed)
        self._weight = keep * self._weight + 1.0
        self._at = now
        self._set()

    def relax(self, now: float) -> None:
        """Forget a little for the time that has passed."""
        if self._gap:
            left = self._left(now)
            self._gap, self._spread2, self._weight = left * self._gap, left * self._spread2, left * self._weight
            self._at = now
            self._set()

    def _left(self, now: float) -> float:
        return exp(-max(0.0, now - self._at) / _OWN_MEMORY_S)

    def _set(self) -> None:
        beyond = self._gap + _STANDARD_ERRORS * sqrt(self._spread2)
        self.shift = min(0.0, beyond / (self._weight + _PRIOR_WEIGHT))

    def __repr__(self) -> str:
        return f"<TargetBias {self.shift:+.3f}>"


class Prediction(NamedTuple):
    """A claim that an answer comes by `due_at`. Settle it once: `answered`, `failed` or `given_up`.

    A miss that is its target's fault (it had promised its answer for earlier, and owes it) says nothing of the model of
    chances, which all targets share: only the target's own account has it.
    """

    raw: float
    claimed: float
    due_at: float
    calibration: Calibration
    bias: TargetBias

    def answered(self, now: float) -> None:
        self._settle(now <= self.due_at, now)

    def failed(self, now: float, *, is_fault: bool = False) -> None:
        """No answer will come from there, whatever the reason: that is not in time."""
        if is_fault:
            self.bias.record(self.claimed, False, now)
        else:
            self._settle(False, now)

    def given_up(self, now: float, *, is_fault: bool = False) -> None:
        """The attempt was given up. At its deadline that is a miss; before it nothing is known."""
        if now >= self.due_at - _EARLY_S:
            self.failed(now, is_fault=is_fault)

    def _settle(self, came: bool, now: float) -> None:
        self.calibration.record(self.raw, self.claimed, came)
        self.bias.record(self.claimed, came, now)
