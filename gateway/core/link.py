"""What a path to a target is like now, learned passively from the frames that come anyway.

An answer says how long it queued and computed there, so what is left of its total time was the link: no clocks need
to agree. An accept-ack is a round trip by itself, and the link stream's own pings stand in while there is no traffic.

Three readings of the same round trips, for three kinds of reader:

    rtt_s, jitter_s   smoothed round trip and mean deviation (TCP's estimator), weighted by time as well as by count:
                      after a silence, and when the weather turns, the news counts for more
    path(now)         the round trips themselves as a weighted sample, for chances: a jittering link has two humps and
                      no normal distribution describes it. The last 32, the newest 6 twice, and two points that were
                      never seen (1.2 × and 4 × the calm link), so that few samples make nobody sure
    trust(now)        how far to believe that the path works at all

`path` knows the weather (`Regime`): while it is foul only round trips of the last 2 s count, since the calm ones speak
of another link. Time on the wire is taken out of a round trip before it is kept (`s_per_byte`, learned from large
bodies, both directions as one), so that a large body is not taken for jitter.

Trust: an attempt that was not acknowledged 20 ms after four usual round trips, while nothing else came over this path
either, is evidence at once: each quarters the trust, three at most. Giving such an attempt up does not take its
evidence away; any frame that arrives does. Paths that never acknowledge (plain unary calls) are always trusted. An
answer that is merely overdue is never evidence: it is more often a mispredicted queue than a slow link, and taking it
for link trouble feeds back on itself (routing.md B2: 4 to 9 points of attainment).

Invariants: `path`'s weights sum to 1 and its values do not fall; 1/64 <= trust <= 1; memory is bounded by the attempts
under way. Everything but `path` after a change is O(1).
Source: RFC 6298; routing.md B2.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from math import exp, inf
from typing import Final, NamedTuple

from gateway.core.regime import Regime
from gateway.core.windowed_min import WindowedMin

_MEAN_WEIGHT: Final = 1 / 8  # RFC 6298's alpha
_DEVIATION_WEIGHT: Final = 1 / 4  # RFC 6298's beta
_MEMORY_S: Final = 10.0  # a sample this old has lost two thirds of its say; also the window of the minimum
_RING: Final = 32
_NEWEST: Final = 6  # count twice
_UNSEEN: Final = (1.2, 4.0)  # × the calm link
_FOUL_S: Final = 2.0  # what older round trips say is void while the weather is foul
LARGE_BYTES: Final = 32 * 1024  # bodies from here on tell the bandwidth: below, jitter drowns it
_BANDWIDTH_WEIGHT: Final = 0.2
_PATIENCE: Final = 4.0  # usual round trips without an ack, and ...
_PATIENCE_S: Final = 0.020  # ... this on top
_DOUBT: Final = 0.25
_MAX_DOUBTS: Final = 3


class Path(NamedTuple):
    """A weighted sample of round trips, sorted. `below[i]` is the weight of all before `values_s[i]`."""

    values_s: tuple[float, ...]
    weights: tuple[float, ...]
    below: tuple[float, ...]  # one longer than the others; the last is 1

    @property
    def median_s(self) -> float:
        return next(value for value, below in zip(self.values_s, self.below[1:], strict=True) if below >= 0.5 - 1e-9)


class LinkEstimate:
    """Mutable: `record` round trips; `sent`, `accepted` and `ended` follow attempts; read the rest."""

    __slots__ = (
        "_calm", "_doubts", "_heard_at", "_path", "_path_until", "_regime", "_ring", "_sampled_at", "_unaccepted",
        "acknowledges", "jitter_s", "rtt_s", "s_per_byte", "samples",
    )  # fmt: skip

    def __init__(self, *, prior_rtt_s: float = 0.005) -> None:
        self.rtt_s = prior_rtt_s
        self.jitter_s = prior_rtt_s / 2  # RFC 6298: the first deviation is half of the first round trip
        self.samples = 0
        self.s_per_byte = 0.0  # seconds on the wire per byte of body; 0 until a large one was seen
        self.acknowledges = False  # whether an accept-ack ever came over this path
        self._sampled_at = 0.0
        self._ring: deque[tuple[float, float]] = deque(maxlen=_RING)  # (instant, round trip)
        self._calm = WindowedMin(_MEMORY_S, prior_rtt_s)
        self._regime = Regime()
        self._path: Path | None = None
        self._path_until = 0.0  # when the kept path begins to say what is void
        self._unaccepted: dict[int, tuple[float, int]] = {}  # attempt → (sent at, bytes), oldest first
        self._heard_at = 0.0
        self._doubts = 0  # overdue acks of attempts that were given up, since anything was heard

    @property
    def calm_s(self) -> float:
        """The least round trip of the last 10 s: the link without its jitter."""
        return self._calm.value

    @property
    def foul(self) -> bool:
        """Whether round trips have lately been far above the calm ones."""
        return self._regime.foul

    def record(self, rtt_s: float, now: float, body_bytes: int = 0) -> None:
        """Learn from one round trip without queue and compute. Negative ones (rounding) count as zero.

        Args:
            body_bytes: what travelled with it, both ways together.
        """
        self.heard(now)
        if body_bytes >= LARGE_BYTES:
            self._measure(rtt_s, body_bytes)
        sample_s = max(0.0, rtt_s - body_bytes * self.s_per_byte)
        self._calm.record(sample_s, now)
        turned = self._regime.record(sample_s, self._calm.value)
        self._smooth(sample_s, now, afresh=turned or self.samples == 0)
        self._ring.append((now, sample_s))
        self._path = None
        self._sampled_at = now
        self.samples += 1

    def _measure(self, rtt_s: float, body_bytes: int) -> None:
        observed = max(0.0, rtt_s - self._calm.value) / body_bytes
        weight = _BANDWIDTH_WEIGHT if self.s_per_byte else 1.0
        self.s_per_byte += weight * (observed - self.s_per_byte)

    def _smooth(self, sample_s: float, now: float, *, afresh: bool) -> None:
        if afresh:
            self.rtt_s, self.jitter_s = sample_s, sample_s / 2
            return
        lost_say = 1.0 - exp(-(now - self._sampled_at) / _MEMORY_S)
        error_s = sample_s - self.rtt_s
        self.jitter_s += max(_DEVIATION_WEIGHT, lost_say) * (abs(error_s) - self.jitter_s)
        self.rtt_s += max(_MEAN_WEIGHT, lost_say) * error_s

    # the sample

    def path(self, now: float) -> Path:
        """The round trips that count now. The same object until something changes: keep it to explain later."""
        if self._path is None or now >= self._path_until:
            self._path = self._sampled(now)
        return self._path

    def _sampled(self, now: float) -> Path:
        ring = list(self._ring)
        self._path_until = inf
        if self._regime.foul:
            # The newest always counts: of nothing at all even a stale word is more.
            ring = [one for one in ring[:-1] if one[0] > now - _FOUL_S] + ring[-1:]
            self._path_until = max(now, ring[0][0] + _FOUL_S) if len(ring) > 1 else inf
        points = [(self._calm.value * times, 1.0) for times in _UNSEEN]
        points += [(value_s, 1.0) for _, value_s in ring[:-_NEWEST]]
        points += [(value_s, 2.0) for _, value_s in ring[-_NEWEST:]]
        points.sort()
        total = sum(weight for _, weight in points)
        weights = tuple([weight / total for _, weight in points])
        return Path(tuple([value_s for value_s, _ in points]), weights, (0.0, *accumulate(weights)))

    # acknowledgements

    def sent(self, attempt: int, now: float, body_bytes: int = 0) -> None:
        """An attempt was sent over this path. `ended` must follow."""
        self._unaccepted[attempt] = (now, body_bytes)

    def accepted(self, attempt: int, now: float) -> None:
        """The attempt's accept-ack is here: a round trip by itself. Later acks of the same attempt are ignored."""
        sent = self._unaccepted.pop(attempt, None)
        if sent is not None:
            self.acknowledges = True
            self.record(now - sent[0], now, sent[1])

    def ended(self, attempt: int, now: float, *, heard: bool) -> None:
        """The attempt is over. `heard`: because something came back over this path."""
        if heard:
            self._unaccepted.pop(attempt, None)
            self.heard(now)
        elif attempt in self._unaccepted:
            overdue = self.acknowledges and self._is_overdue(self._unaccepted[attempt][0], now)
            del self._unaccepted[attempt]
            self._doubts = min(_MAX_DOUBTS, self._doubts + overdue)

    def heard(self, now: float) -> None:
        """A frame came over this path: it works."""
        self._heard_at = now
        self._doubts = 0

    def trust(self, now: float) -> float:
        """How much to believe that the path works, 1/64 to 1."""
        doubts = self._doubts
        if self._unaccepted and self.acknowledges:
            for sent_at, _ in self._unaccepted.values():  # oldest first: the first that is in time ends it
                if doubts >= _MAX_DOUBTS or not self._is_overdue(sent_at, now):
                    break
                doubts += 1
        return _DOUBT**doubts if doubts else 1.0

    def patience_s(self, now: float) -> float:
        """How long after an attempt was sent its missing ack begins to be evidence."""
        return _PATIENCE * self.path(now).median_s + _PATIENCE_S

    def _is_overdue(self, sent_at: float, now: float) -> bool:
        silence_s = now - max(sent_at, self._heard_at)
        return silence_s > _PATIENCE_S and silence_s > self.patience_s(now)

    def __repr__(self) -> str:
        weather = " foul" if self.foul else ""
        return f"<LinkEstimate {self.rtt_s * 1e3:.2f} ms ± {self.jitter_s * 1e3:.2f} ms of {self.samples}{weather}>"
