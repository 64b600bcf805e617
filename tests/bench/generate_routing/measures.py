"""What is counted of a run: goodput, smooth goodput, times; as the simulator counts them.

Source: simulator/world/generation_tally.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.bench.generate_routing.schedule import Asked, Heard
from tidegate.estimate.quantiles import nearest_rank

_SLACK_S: Final = 0.002  # of instants that were rounded, and of a loop that was at something else


@dataclass(frozen=True)
class Outcome:
    """One rule on one link at one load. Shares are of the requests that count, rates a second of the time that does."""

    rule: str
    requests: int
    kept: float
    goodput: float
    smooth_tokens_per_s: float
    first_p50_ms: float
    first_p99_ms: float
    each_p50_ms: float
    each_p99_ms: float
    pool_share: float
    resumed: int
    wrong: int  # whole, and not of the right length
    errors: Mapping[str, int]
    busy: float  # of the machine's cores, others' work included
    late_p99_s: float  # by which requests were sent

    @classmethod
    def of(
        cls, rule: str, asked: Sequence[Asked], heard: Sequence[Heard], *, from_s: float, to_s: float,
        busy: float, late_p99_s: float,
    ) -> Outcome:  # fmt: skip
        """Of what was asked between two instants of the run."""
        pairs = [(one, other) for one, other in zip(asked, heard, strict=True) if from_s <= one.at < to_s]
        first = sorted(one.tokens_at[0] for _, one in pairs if one.tokens_at) or [0.0]
        each = sorted(s for _, one in pairs if (s := each_s(one)) is not None) or [0.0]
        answered = [one for _, one in pairs if one.served_by]
        return cls(
            rule=rule,
            requests=len(pairs),
            kept=sum(kept(one, other) for one, other in pairs) / max(1, len(pairs)),
            goodput=sum(kept(one, other) for one, other in pairs) / (to_s - from_s),
            smooth_tokens_per_s=sum(in_time(one, other) for one, other in pairs) / (to_s - from_s),
            first_p50_ms=1e3 * nearest_rank(first, 0.5),
            first_p99_ms=1e3 * nearest_rank(first, 0.99),
            each_p50_ms=1e3 * nearest_rank(each, 0.5),
            each_p99_ms=1e3 * nearest_rank(each, 0.99),
            pool_share=sum(one.served_by.startswith("pool/") for one in answered) / max(1, len(answered)),
            resumed=sum(one.resumed > 0 for _, one in pairs),
            wrong=sum(other.whole and len(other.tokens_at) != one.tokens for one, other in pairs),
            errors=dict(Counter(one.error[:60] for _, one in pairs if one.error)),
            busy=busy,
            late_p99_s=late_p99_s,
        )


def kept(asked: Asked, heard: Heard) -> bool:
    """Whether the answer was whole and kept the budgets of its tokens."""
    if not heard.whole or not heard.tokens_at or heard.tokens_at[0] > asked.ttft_s + _SLACK_S:
        return False
    each = each_s(heard)
    return each is None or each <= asked.tpot_s


def in_time(asked: Asked, heard: Heard) -> int:
    """Tokens that came by their own instants: first budget + n · next budget."""
    return sum(at <= asked.ttft_s + place * asked.tpot_s + _SLACK_S for place, at in enumerate(heard.tokens_at))


def each_s(heard: Heard) -> float | None:
    """Seconds for each token after the first, on average."""
    made = len(heard.tokens_at)
    return (heard.tokens_at[-1] - heard.tokens_at[0]) / (made - 1) if made > 1 else None


def heard_of(raw: Sequence[Mapping[str, Any]]) -> list[Heard]:
    return [Heard(**one) for one in raw]
