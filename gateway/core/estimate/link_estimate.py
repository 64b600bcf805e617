"""The link estimate describes the path to a target, learned passively from the frames that come anyway.

An answer says how long it queued and computed there, so what is left of its total time was the link: no clocks need
to agree. An accept-ack is a round trip by itself, and the link stream's own pings stand in while there is no traffic.

Three readings of the same round trips, for three kinds of reader:

    rtt_s, jitter_s   smoothed round trip and mean deviation (TCP's estimator), weighted by time as well as by count:
                      after a silence, and when the weather turns, the news counts for more
    path(now)         the round trips themselves as a weighted sample, for chances: a jittering link has two humps and
                      no normal distribution describes it. The last 32, the newest 6 twice, and two points that were
                      never seen (1.2 × and 4 × the calm link), so that few samples are no certainty
    trust(now)        how far to believe that the path works at all

The first round trips are often measured while one of the processes is still starting: on loopback 100 ms have been
seen, which an idle link would need half a minute to unlearn. So, among the first 8, one that is four times as short as
the estimate says that those before it were not the path's, and everything but the bandwidth begins anew with it.

`path` knows the weather (`link_weather.py`). Where slow round trips come in spells it is what comes after the last one,
and after a silence, instead of the last 32 (`RttWeather`); `trust` stays with those, since a spell would excuse each
silence. Where nothing is foretold, but it is foul (`RttRegime`), only round trips of the last 2 s count: the calm ones
speak of another link. Time on the wire is taken out of a round trip before it is kept (`s_per_byte`, learned from large
bodies, both directions as one), so that a large body is not taken for jitter.

Trust is Bayes' rule on silence: an attempt waits for its ack, and nothing else came over this path either. A path that
works is silent for so long with the chance that its sample has of longer round trips; a broken one always is. So 40 ms
say nothing of a WAN and everything of a WiFi, a silence that one round trip in ten exceeds says nothing at all, and no
count of attempts is needed: those that are sent into one silence are one observation. Giving an attempt up does not
take an unusual silence away; any frame that arrives does. One that is given up earlier proves nothing, as if it had
not been sent. Paths that never acknowledge (plain unary calls) are always trusted.
An answer that is merely overdue is never evidence: it is more often a mispredicted queue than a slow link, and taking
it for link trouble feeds back on itself (docs/design/routing.md, "Silence as evidence": 4 to 9 points of attainment).

`s_per_byte` is how long bodies take, queues on the link included, which is what an attempt at it now will meet. What a
smaller body would meet is another question, and `wire` (`WireCapacity`) answers it.

Invariants: `path`'s weights sum to 1 and its values do not fall; 0 < trust <= 1; memory is bounded by the attempts
under way. Everything but `path` after a change is O(1).
Source: RFC 6298; docs/design/routing.md, "Link estimates".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import KeysView, Sequence
from itertools import accumulate
from math import exp, inf
from typing import Final

from gateway.core.estimate.link_weather import RttRegime, RttWeather
from gateway.core.estimate.windowed_min import WindowedMin

_MEAN_WEIGHT: Final = 1 / 8  # RFC 6298's alpha
_DEVIATION_WEIGHT: Final = 1 / 4  # RFC 6298's beta
_OFTEN_S: Final = 1.0  # between samples: 1 − exp(−1 / 10) is less than the weights above
_MEMORY_S: Final = 10.0  # a sample this old has lost two thirds of its say; also the window of the minimum
_RING: Final = 32
_NEWEST: Final = 6  # count twice
_YOUNG: Final = 8  # the first round trips of a link
_FAR_OFF: Final = 4.0
_UNSEEN: Final[tuple[float, ...]] = (1.2, 4.0)  # × the calm link
_UNSEEN_SHARE: Final = 1 / 38  # as in a sample of 32, of which 6 count twice
_FORETOLD_S: Final = 0.01  # a silence says more as it gets longer
_FOUL_S: Final = 2.0  # what older round trips say is void while the weather is foul
LARGE_BYTES: Final = 32 * 1024  # bodies from here on tell the bandwidth: below, jitter drowns it
_BANDWIDTH_WEIGHT: Final = 0.2
_PACED_BYTES: Final = 16 * 1024  # delivered in one piece, tell the pace: less takes no longer than jitter
_PACE_WEIGHT: Final = 0.3
_NOT_UNUSUAL: Final = 0.1  # a silence that so many round trips are longer than says nothing
LOST: Final = 0.05  # of trust
_MUTE_AFTER: Final = 3  # attempts without an ack, and times the patience
_PATIENCE: Final = 4.0  # usual round trips without an ack, and ...
_PATIENCE_S: Final = 0.020  # ... this on top
RESENT_S: Final = 0.2  # TCP's least retransmission timeout (Linux): what a lost packet costs at least
_LOSS_WEIGHT: Final = 1 / 32
_LEAST_S: Final = 1e-6  # clocks round: a round trip of nothing is still one
SLACK_S: Final = 0.020  # a busy process at either end is silent for so long without any fault
BROKEN: Final = 0.02  # the chance, before any silence, that a path breaks while an attempt is on it


class RttDistribution:
    """A weighted sample of round trips, sorted. Immutable.

    Each request changes the sample of a path, and most decisions read no more of it than its ends and its median. So
    the weights are kept as counts, and become shares when they are read first.
    """

    __slots__ = ("_below", "_counts", "_up_to", "_weights", "median_s", "values_s")

    def __init__(self, values_s: tuple[float, ...], counts: Sequence[float]) -> None:
        """Args: values_s: the round trips, shortest first. counts: how often each of them counts."""
        self.values_s = values_s
        self._counts = counts
        self._weights: tuple[float, ...] | None = None
        self._below: tuple[float, ...] | None = None
        self._up_to = up_to = list(accumulate(counts))
        self.median_s = values_s[bisect_left(up_to, 0.5 * up_to[-1])]

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each round trip; their sum is 1."""
        weights = self._weights
        if weights is None:
            total = self._up_to[-1]
            weights = self._weights = tuple([times / total for times in self._counts])
        return weights

    @property
    def below(self) -> tuple[float, ...]:
        """`below[i]` is the weight of all before `values_s[i]`. One longer than the others; the last is 1."""
        below = self._below
        if below is None:
            total = self._up_to[-1]
            below = self._below = (0.0, *[count / total for count in self._up_to])
        return below

    def slower_than(self, seconds: float) -> float:
        """The chance that a round trip takes longer; above 0, since the longest was not seen yet."""
        longest_s = max(_LEAST_S, self.values_s[-1])
        if seconds >= longest_s:
            return self.weights[-1] * (longest_s / seconds) ** 4
        return max(self.weights[-1], 1.0 - self.below[bisect_right(self.values_s, seconds)])

    def quantile_s(self, share: float) -> float:
        """The round trip that so many do not exceed."""
        return self.values_s[min(len(self.values_s), bisect_left(self.below, share - 1e-9)) - 1]


class WireCapacity:
    """How fast bytes get through, and how many of ours are still before the narrowest place. Mutable.

    A body's time divided by its size is the path's pace only where nothing was ahead of it; behind others it is the
    time of the queue, and a link that is loaded seems as slow as it is late. So a pace is taken from what the link
    delivered while it was surely busy: from the last ack, or from the sending where no ack came since.

        pace = (ack − max(sent, last ack)) / bytes that this ack is the first to cover
        ahead = sent − covered by acks − (now − last ack) / pace,     at least 0

    Bytes of attempts that were given up count as well: they are on their way all the same.
    It can be wrong by what others send over the same link, which is taken for a lower pace, as it has to be.
    Source: Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 2016, for the rate of delivery.
    """

    __slots__ = ("_acked_at", "_ahead", "_ahead_at", "_covered", "_sent", "s_per_byte")

    def __init__(self) -> None:
        self.s_per_byte = 0.0  # 0 until enough bytes were seen
        self._sent = 0
        self._covered = 0  # by acks, of those sent
        self._acked_at = 0.0
        self._ahead = 0.0  # bytes that were still on their way ...
        self._ahead_at = 0.0  # ... at this instant

    def send(self, body_bytes: int, now: float) -> int:
        """Take in a body on its way; its end, as `acknowledge` wants it."""
        self._sent += body_bytes
        self._ahead, self._ahead_at = self.ahead_bytes(now) + body_bytes, now
        return self._sent

    def acknowledge(self, end: int, body_bytes: int, sent_at: float, calm_s: float, now: float) -> None:
        """The ack of a body is here, of which `calm_s` was the round trip itself where it was alone."""
        delivered, alone = end - self._covered, sent_at >= self._acked_at
        if delivered <= 0:
            return  # a later one was acknowledged before
        took_s = now - sent_at - calm_s if alone else now - self._acked_at
        if alone:  # what was given up before it may have been through long ago
            delivered = min(delivered, body_bytes)
        self._covered, self._acked_at = end, now
        self._ahead, self._ahead_at = float(self._sent - end), now
        if delivered >= _PACED_BYTES and took_s > 0.0:
            weight = _PACE_WEIGHT if self.s_per_byte else 1.0
            self.s_per_byte += weight * (took_s / delivered - self.s_per_byte)

    def outlast(self, end: int, sent_at: float, calm_s: float, now: float) -> None:
        """A body was given up before its ack: the pace is at least what it would then have been.

        Where every body is given up, since none gets through within its budget, nothing else is ever learned.
        """
        alone = sent_at >= self._acked_at
        busy_s = now - sent_at - calm_s if alone else now - self._acked_at
        most = end - self._covered
        if most >= _PACED_BYTES and busy_s > most * self.s_per_byte:
            self.s_per_byte = busy_s / most

    def ahead_bytes(self, now: float) -> float:
        """What a body that is sent now would wait for; 0 while the pace is not known."""
        if not self.s_per_byte:
            return 0.0
        return max(0.0, self._ahead - (now - self._ahead_at) / self.s_per_byte)

    def through_at(self) -> float:
        """When all that is on its way is expected to be through; no ack of it is due before."""
        return self._ahead_at + self._ahead * self.s_per_byte

    def __repr__(self) -> str:
        return f"<WireCapacity {self.s_per_byte * 1e9:.2f} ns a byte>"


class LinkEstimate:
    """Mutable: `record` round trips; `sent`, `accepted` and `ended` follow attempts; read the rest."""

    __slots__ = (
        "_calm",
        "_foretold",
        "_foretold_until",
        "_numbers",
        "_regime",
        "_ring",
        "_sampled_at",
        "_seems_lost_since",
        "_seems_mute_since",
        "_unaccepted",
        "_unanswered",
        "_usual",
        "_usual_until",
        "_values_s",
        "_weather",
        "acknowledges",
        "jitter_s",
        "loss_ratio",
        "rtt_s",
        "s_per_byte",
        "samples",
        "silent_since",
        "wire",
    )  # fmt: skip

    def __init__(self, *, prior_rtt_s: float = 0.005) -> None:
        self.rtt_s = prior_rtt_s
        self.jitter_s = prior_rtt_s / 2  # RFC 6298: the first deviation is half of the first round trip
        self.loss_ratio = 0.0  # of round trips lately: as late as one whose packets had to be sent again
        self.samples = 0
        self.s_per_byte = 0.0  # seconds on the wire per byte of body; 0 until a large one was seen
        self.acknowledges = False  # whether an accept-ack ever came over this path
        self.silent_since: float | None = None  # an ack is due since then, and nothing came; None: trusted, not mute
        self.wire = WireCapacity()
        self._sampled_at = 0.0
        self._ring: deque[tuple[float, float, int]] = deque()  # (instant, round trip, its number), oldest first
        self._values_s: list[float] = []  # the same round trips, shortest first, ...
        self._numbers: list[int] = []  # ... and the number of each
        self._calm = WindowedMin(_MEMORY_S, prior_rtt_s)
        self._regime = RttRegime()
        self._weather = RttWeather()
        self._usual: RttDistribution | None = None
        self._usual_until = 0.0  # when what is kept begins to say what is void
        self._foretold: RttDistribution | None = None
        self._foretold_until = 0.0  # likewise
        self._unaccepted: dict[int, tuple[float, int, int]] = {}  # attempt → (sent at, bytes, their end), oldest first
        self._seems_mute_since: float | None = None  # the first look that found it so
        self._seems_lost_since: float | None = None  # likewise
        self._unanswered = 0  # attempts whose acks did not come since anything was heard

    @property
    def calm_s(self) -> float:
        """The least round trip of the last 10 s: the link without its jitter."""
        return self._calm.value

    @property
    def is_degraded(self) -> bool:
        """Whether round trips have lately been far above the calm ones."""
        return self._regime.is_degraded

    def record(self, rtt_s: float, now: float, body_bytes: int = 0) -> None:
        """Learn from one round trip without queue and compute. Negative ones (rounding) count as zero.

        Args:
            body_bytes: what travelled with it, both ways together.
        """
        self.heard(now)
        if body_bytes >= LARGE_BYTES:
            self._measure(rtt_s, body_bytes)
        sample_s = rtt_s - body_bytes * self.s_per_byte
        if sample_s < 0.0:
            sample_s = 0.0
        self._calm.record(sample_s, now)
        calm_s = self._calm.value
        turned = self._regime.record(sample_s, calm_s)
        self.loss_ratio += _LOSS_WEIGHT * ((sample_s - calm_s >= RESENT_S) - self.loss_ratio)
        if settled := self.samples < _YOUNG and sample_s * _FAR_OFF < self.rtt_s:
            self._ring.clear()
            self._values_s.clear()
            self._numbers.clear()
            self._weather = RttWeather()
        self._weather.record(sample_s, now)
        self._smooth(sample_s, now, afresh=turned or settled or self.samples == 0)
        self._keep(sample_s, now)
        self._usual = self._foretold = None
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
        error_s, since_s = sample_s - self.rtt_s, now - self._sampled_at
        mean_weight, deviation_weight = _MEAN_WEIGHT, _DEVIATION_WEIGHT
        if since_s > _OFTEN_S:  # sooner the exponential is below both weights
            lost_say = 1.0 - exp(-since_s / _MEMORY_S)
            mean_weight, deviation_weight = max(mean_weight, lost_say), max(deviation_weight, lost_say)
        self.jitter_s += deviation_weight * (abs(error_s) - self.jitter_s)
        self.rtt_s += mean_weight * error_s

    # the sample

    def path(self, now: float) -> RttDistribution:
        """The round trips to reckon with now. The same object until something changes: keep it to explain later."""
        if not self._weather.tells:
            return self.usual(now)
        if self._foretold is None or now >= self._foretold_until:
            self._foretold, self._foretold_until = self._after_the_last(now), now + _FORETOLD_S
        return self._foretold

    def usual(self, now: float) -> RttDistribution:
        """The last round trips: what a silence is held against, which a spell of slow ones would excuse."""
        if self._usual is None or now >= self._usual_until:
            self._usual = self._sampled(now)
        return self._usual

    def _keep(self, sample_s: float, now: float) -> None:
        """Put a round trip into the sample, in place of the oldest one once there are `_RING`."""
        if len(self._ring) == _RING:
            place = bisect_left(self._values_s, self._ring.popleft()[1])  # of equal ones the oldest comes first
            del self._values_s[place], self._numbers[place]
        self._ring.append((now, sample_s, self.samples))
        place = bisect_right(self._values_s, sample_s)
        self._values_s.insert(place, sample_s)
        self._numbers.insert(place, self.samples)

    def _sampled(self, now: float) -> RttDistribution:
        # Each request changes the sample of one path, so that this runs for each: the order is kept from one to the
        # next instead of being found anew, which took five times as long.
        self._usual_until = inf
        values_s, numbers = self._values_s.copy(), self._numbers
        if self._regime.is_degraded:
            # The newest always counts: of nothing at all even a stale word is more.
            newest, oldest = self._ring[-1], self._ring[0]
            if oldest[0] <= now - _FOUL_S:
                oldest = next((one for one in self._ring if one[0] > now - _FOUL_S), newest)
            if oldest is not newest:
                self._usual_until = max(now, oldest[0] + _FOUL_S)
            if oldest is not self._ring[0]:
                first = oldest[2]
                values_s = [value_s for value_s, number in zip(values_s, numbers, strict=True) if number >= first]
                numbers = [number for number in numbers if number >= first]
        newest_from = self.samples - _NEWEST
        counts = [2.0 if number >= newest_from else 1.0 for number in numbers]
        return self._with_unseen(values_s, counts, 1.0)

    def _after_the_last(self, now: float) -> RttDistribution:
        """The sample where the weather hangs together: what comes after the last round trip, and after a silence."""
        silent_since = self.silent_since if self.acknowledges else None
        silence_s = 0.0 if silent_since is None else now - silent_since - SLACK_S
        values_s, shares = self._weather.sample(now, silence_s)
        return self._with_unseen(values_s, shares, _UNSEEN_SHARE)

    def _with_unseen(self, values_s: list[float], counts: list[float], unseen: float) -> RttDistribution:
        for times in _UNSEEN:
            value_s = self._calm.value * times
            place = bisect_left(values_s, value_s)
            values_s.insert(place, value_s)
            counts.insert(place, unseen)
        return RttDistribution(tuple(values_s), counts)

    # acknowledgements

    def sent(self, attempt: int, now: float, body_bytes: int = 0) -> None:
        """An attempt was sent over this path. `ended` must follow."""
        self._unaccepted[attempt] = (now, body_bytes, self.wire.send(body_bytes, now))
        self._unanswered += 1
        if self.silent_since is None:
            self.silent_since = now

    def accepted(self, attempt: int, now: float) -> None:
        """The attempt's accept-ack is here: a round trip by itself. Later acks of the same attempt are ignored."""
        sent = self._unaccepted.pop(attempt, None)
        if sent is not None:
            self.acknowledges = True
            self.wire.acknowledge(sent[2], sent[1], sent[0], self._calm.value, now)
            self.record(now - sent[0], now, sent[1])

    def ended(self, attempt: int, now: float, *, heard: bool) -> None:
        """The attempt is over. `heard`: because something came back over this path."""
        due = self._unaccepted.pop(attempt, None)
        if due is not None and not heard:
            self.wire.outlast(due[2], due[0], self._calm.value, now)
        if heard:
            self.heard(now)
        elif due is not None and self.silent_since is not None and self.trust(now) == 1.0:
            self._left_early(self.silent_since)

    def _left_early(self, silent_since: float) -> None:
        """An attempt given up before silence was unusual leaves no ack due and no evidence: the silence is the others'.

        Otherwise callers that leave, one before the other's ack was due, would add up to a path that says nothing.
        """
        self._unanswered -= 1
        self._seems_mute_since = self._seems_lost_since = None
        oldest = next(iter(self._unaccepted.values()), None)
        self.silent_since = None if oldest is None else max(silent_since, oldest[0])

    def heard(self, now: float) -> None:
        """A frame came over this path: it works."""
        self.silent_since, self._unanswered = (now, len(self._unaccepted)) if self._unaccepted else (None, 0)
        self._seems_mute_since = self._seems_lost_since = None

    def is_lost(self, now: float) -> bool:
        """Whether what was sent over this path is surely not answered in its usual time: its trust is next to nothing.

        Seen twice, as `is_mute`, and much sooner: it moves requests and takes no target out.
        """
        if self.silent_since is None or self.trust(now) > LOST:
            return False
        if self._seems_lost_since is None:
            self._seems_lost_since = now
        return now - self._seems_lost_since >= SLACK_S

    def is_mute(self, now: float) -> bool:
        """Whether three acks are overdue, and nothing came for three times as long as makes one overdue.

        To be seen twice, some time apart: where this process stood still itself, the acks wait to be read, and the
        first look comes before them.
        """
        if self.silent_since is None or self._unanswered < _MUTE_AFTER or not self.acknowledges:
            return False
        silence_s = now - self.silent_since
        # Patience is at least `_PATIENCE_S`: nearly every look ends here, without the sample.
        if silence_s <= _MUTE_AFTER * _PATIENCE_S or silence_s <= _MUTE_AFTER * self.patience_s(now):
            return False
        if self._seems_mute_since is None:
            self._seems_mute_since = now
        return now - self._seems_mute_since >= SLACK_S

    def patience_s(self, now: float) -> float:
        """How long an ack may take until its absence is held against the path's health (`breaker`)."""
        return _PATIENCE * self.usual(now).median_s + _PATIENCE_S

    def trust(self, now: float) -> float:
        """How far to believe that the path works now."""
        if self.silent_since is None or not self.acknowledges:
            return 1.0
        return self.answers_after(now - self.silent_since, now)

    def answers_after(self, silence_s: float, now: float) -> float:
        """The chance that a path that has been silent for so long, with an ack due, will still speak.

        By Bayes' rule: a working path takes longer than this with the chance that the sample has; a broken one always.
        """
        if silence_s <= SLACK_S:
            return 1.0
        slower = self.usual(now).slower_than(silence_s - SLACK_S)
        return 1.0 if slower >= _NOT_UNUSUAL else slower / (slower + BROKEN)

    @property
    def unaccepted(self) -> KeysView[int]:
        """The attempts that have neither been acknowledged nor ended, oldest first."""
        return self._unaccepted.keys()

    @property
    def unanswered(self) -> int:
        """How many attempts are without an ack since the path was last heard, also those that have ended since."""
        return self._unanswered

    @property
    def awaiting_ack(self) -> int:
        """How many attempts have neither been acknowledged nor ended."""
        return len(self._unaccepted)

    def __repr__(self) -> str:
        weather = " foul" if self.is_degraded else ""
        return f"<LinkEstimate {self.rtt_s * 1e3:.2f} ms ± {self.jitter_s * 1e3:.2f} ms of {self.samples}{weather}>"
