"""How long a frame takes to a target and back, learned passively from the answers that come anyway.

An answer says how long it queued and computed there, so what is left of its total time was the link: no clocks need
to agree and no probe is needed while there is traffic. Idle links are measured by the link stream's own pings.

Kept are a smoothed round trip and its mean deviation (TCP's estimator), weighted by recency in time and not only in
count: after a silence the first sample counts for more, because the old ones speak of another time. A missing answer
is not evidence here: an overdue answer is more often a mispredicted queue than a slow link, and taking it for link
trouble feeds back on itself (routing.md B2).

Bandwidth, the windowed minimum and regime changes are not modelled yet: a large body looks like jitter.
Source: RFC 6298; routing.md B2.
"""

from __future__ import annotations

from math import exp

_MEAN_WEIGHT = 1 / 8  # RFC 6298's alpha
_DEVIATION_WEIGHT = 1 / 4  # RFC 6298's beta
_MEMORY_S = 10.0  # a sample this old has lost two thirds of its say


class LinkEstimate:
    """Mutable: `record` each sample; `rtt_s` and `jitter_s` (mean deviation) are the estimate."""

    __slots__ = ("_sampled_at", "jitter_s", "rtt_s", "samples")

    def __init__(self, *, prior_rtt_s: float = 0.005) -> None:
        self.rtt_s = prior_rtt_s
        self.jitter_s = prior_rtt_s / 2  # RFC 6298: the first deviation is half of the first round trip
        self.samples = 0
        self._sampled_at = 0.0

    def record(self, rtt_s: float, now: float) -> None:
        """Learn from one round trip without queue and compute. Negative ones (rounding) count as zero."""
        sample_s = max(0.0, rtt_s)
        if self.samples == 0:
            self.rtt_s, self.jitter_s = sample_s, sample_s / 2
        else:
            lost_say = 1.0 - exp(-(now - self._sampled_at) / _MEMORY_S)
            error_s = sample_s - self.rtt_s
            self.jitter_s += max(_DEVIATION_WEIGHT, lost_say) * (abs(error_s) - self.jitter_s)
            self.rtt_s += max(_MEAN_WEIGHT, lost_say) * error_s
        self._sampled_at = now
        self.samples += 1

    def __repr__(self) -> str:
        return f"<LinkEstimate {self.rtt_s * 1e3:.2f} ms ± {self.jitter_s * 1e3:.2f} ms of {self.samples}>"
