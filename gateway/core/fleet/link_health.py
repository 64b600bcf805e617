"""Link health says for people whether the link to a target is well, in one word and its reason.

Placement reads the estimates themselves and needs no such word. People ask "which link is sick?", and want one answer
within seconds, the same on every screen:

    down     nothing can be sent there now
    suspect  it is used with doubt: its breaker or its path's is not closed, or its device's word is old
    silent   an answer is due and the link has said nothing for longer than it usually takes
    slow     its round trips have turned foul (`RttRegime`), or are several times what they were over the last minutes
    well

`LinkEstimate` forgets what a link was like within ten seconds, as it should for predictions: after those a link that
stays slow is simply what it is. So a timeline of samples is kept here, and their lower quartile is the link's usual
round trip: five minutes of one sick spell in four do not move it. A link that is slow for longer than most of the
timeline is usual, and well again.

Invariants: a timeline holds `LENGTH` samples at most; the reason is "" exactly when the link is well.
"""

from __future__ import annotations

from array import array
from math import isnan, nan
from typing import Final, Literal, NamedTuple

from gateway.core.fleet.target import TargetView
from gateway.core.health.breaker import BreakerState

Health = Literal["down", "suspect", "silent", "slow", "well"]
WORST_FIRST: Final[tuple[Health, ...]] = ("down", "suspect", "silent", "slow", "well")

SAMPLE_EVERY_S: Final = 2.0
LENGTH: Final = 150  # five minutes
_ENOUGH: Final = 5  # samples that make a usual round trip
_TIMES: Final = 3.0
_SLACK_S: Final = 0.025  # a busy machine's worth: on loopback round trips are many times as long now and then
_DOUBT: Final = 0.5  # of the path's trust
_JUDGE_EVERY: Final = 5  # samples: sorting a thousand timelines every second would be most of what this costs


class LinkState(NamedTuple):
    health: Health
    reason: str


class RttTimeline:
    """Mutable: one link's round trips, a sample every two seconds; NaN where there was no link."""

    __slots__ = ("_rtts_s", "_taken", "usual_s")

    def __init__(self) -> None:
        self.usual_s = nan  # NaN: too few samples to say
        self._rtts_s: array[float] = array("f")
        self._taken = 0

    def sample(self, target: TargetView) -> None:
        self._rtts_s.append(target.link.rtt_s if target.up and target.link.samples else nan)
        if len(self._rtts_s) > LENGTH:
            del self._rtts_s[0]
        self._taken += 1
        if self._taken % _JUDGE_EVERY == 0:
            self._judge()

    def _judge(self) -> None:
        seen = sorted(rtt_s for rtt_s in self._rtts_s if not isnan(rtt_s))
        if len(seen) >= _ENOUGH:
            self.usual_s = seen[len(seen) // 4]

    def last(self, most: int) -> list[float | None]:
        """The newest samples, oldest first; None where there was no link."""
        return [None if isnan(rtt_s) else rtt_s for rtt_s in self._rtts_s[-most:]]

    def __repr__(self) -> str:
        return f"<RttTimeline {len(self._rtts_s)} samples, usually {self.usual_s * 1e3:.2f} ms>"


def link_state(target: TargetView, timeline: RttTimeline | None, now: float) -> LinkState:
    """How the link to the target is, and why it is said to be so."""
    state, reason = target.state(now)
    if state == "down":
        return LinkState("down", reason or "it is down")
    if state == "suspect":
        return LinkState("suspect", reason or "it is in doubt")
    link = target.link
    if target.path_breaker.state is not BreakerState.CLOSED:
        return LinkState("suspect", f"the way to it kept failing ({target.path_breaker.reason})")
    if link.silent_since is not None and link.trust(now) < _DOUBT:
        return LinkState("silent", f"nothing heard for {_ms(now - link.silent_since)}, though an answer is due")
    usual_s = nan if timeline is None else timeline.usual_s
    if not isnan(usual_s) and link.rtt_s > _TIMES * usual_s + _SLACK_S:
        return LinkState("slow", f"round trips take {_ms(link.rtt_s)}, usually {_ms(usual_s)}")
    if link.is_degraded and link.rtt_s > link.calm_s + _SLACK_S:
        return LinkState("slow", f"round trips take {_ms(link.rtt_s)}, lately {_ms(link.calm_s)} when calm")
    return LinkState("well", "")


def _ms(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
