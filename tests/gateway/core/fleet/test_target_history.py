"""What was learned of a target outlives its absence, for a while, and once."""

from __future__ import annotations

from gateway.core.estimate.link_estimate import LinkEstimate
from gateway.core.fleet.target_history import KEPT_S, MOST, Learned, TargetHistory

NOW = 1000.0


def learned() -> Learned:
    return Learned({}, LinkEstimate(prior_rtt_s=0.005))


def test_it_is_handed_out_once() -> None:
    history, of_a = TargetHistory(), learned()
    history.keep("pool/a", of_a, NOW)
    assert history.take("pool/a", NOW + KEPT_S - 1) is of_a
    assert history.take("pool/a", NOW + KEPT_S - 1) is None


def test_it_is_forgotten_in_time() -> None:
    history = TargetHistory()
    history.keep("pool/a", learned(), NOW)
    assert history.take("pool/a", NOW + KEPT_S) is None


def test_it_is_bounded_and_keeps_the_newest() -> None:
    history = TargetHistory()
    for number in range(MOST + 5):
        history.keep(f"pool/{number}", learned(), NOW)
    assert len(history) == MOST
    assert history.take("pool/4", NOW) is None and history.take("pool/5", NOW) is not None
