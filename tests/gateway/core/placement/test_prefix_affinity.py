"""A prompt goes where its beginning was computed, as far as that saves more time than the queue there costs."""

from __future__ import annotations

import struct

import pytest
from msgspec.structs import replace

from gateway.core.estimate.known_prefixes import BLOCK, PrefixChain, prefix_chain
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.generation_time import GenerationAsk
from gateway.core.placement.placer import Candidate, Placer
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry, ComputedTokens, ComputedWork
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant

INSTRUCTIONS = tuple(range(100, 100 + 20 * BLOCK))
TOKEN_S = 0.0002  # of a prompt; a step of the answer takes as long
STAGES = {"queue": 0.0, "compute": 0.4}


def pools(slots: int = 8) -> Fleet:
    talks = replace(variant(), slots=slots, cost=((1.0, TOKEN_S), (1001.0, 1001 * TOKEN_S)))
    return fleet_of(pool_a=talks, pool_b=talks)


def chain(*after: int, tenant: str = "acme") -> PrefixChain:
    ids = (*INSTRUCTIONS, *after)
    return prefix_chain(struct.pack(f"<{len(ids)}i", *ids), tenant)


def prompt(prefix: PrefixChain) -> GenerationAsk:
    tokens = len(INSTRUCTIONS) + 16.0
    return GenerationAsk(tokens, tokens, tokens + 15, (16.0,), 16.0, 16, token_units=1.0, prefix=prefix)


def launched(placer: Placer, key: int, prefix: PrefixChain) -> tuple[Candidate, AttemptTelemetry]:
    decision = placer.decide(ask(budget_s=1.0, units=352.0)._replace(generation=prompt(prefix)), NOW)
    assert decision.chosen is not None
    return decision.chosen, AttemptTelemetry(decision.chosen, key, 352.0, NOW, prefix=prefix)


def answers(fleet: Fleet, target: str, prefix: PrefixChain, cached: int, times: int = 10) -> None:
    """A target has computed such prompts, and said how much of them it had."""
    for offered in fleet.offered("minilm", "1"):
        if offered.target.id == target:
            for _ in range(times):
                offered.cost.pace.prefixes.computed(prefix, cached)


@pytest.mark.parametrize("placer_of", [Placer, UtilityPlacer])
def test_a_prompt_goes_where_its_beginning_is(placer_of: type[Placer]) -> None:
    for there in ("pool/a", "pool/b"):
        fleet = pools()
        answers(fleet, there, chain(1), len(INSTRUCTIONS))
        chosen, attempt = launched(placer_of(fleet), 1, chain(2))
        assert chosen.target.id == there
        assert chosen.tokens is not None
        assert chosen.tokens.cached_tokens == pytest.approx(len(INSTRUCTIONS), rel=0.1)
        assert chosen.tokens.first_s == pytest.approx((336.0 - chosen.tokens.cached_tokens) * TOKEN_S)
        attempt.cancelled(NOW)


def test_what_another_tenant_s_prompts_left_is_not_looked_at() -> None:
    fleet = pools()
    answers(fleet, "pool/a", chain(1, tenant="other"), len(INSTRUCTIONS))
    chosen, _ = launched(UtilityPlacer(fleet), 1, chain(2))
    assert chosen.tokens is not None
    assert chosen.tokens.cached_tokens == 0.0


def test_a_full_target_is_left_although_it_has_the_beginning() -> None:
    fleet = pools(slots=1)
    answers(fleet, "pool/a", chain(1), len(INSTRUCTIONS))
    placer, went = UtilityPlacer(fleet), []
    for key in range(400):
        chosen, _ = launched(placer, key, chain(key))
        went.append(chosen.target.id)
    assert went[:4] == ["pool/a"] * 4, "a few before it cost less than the prompt would"
    assert "pool/b" in went


def test_first_tokens_and_whole_answers_tell_what_a_target_had_once_each() -> None:
    fleet = pools()
    placer = UtilityPlacer(fleet)
    for key in range(6):
        chosen, attempt = launched(placer, key, chain(key))
        known = chosen.offered.cost.pace.prefixes
        before = known.known_tokens(chain(7))
        cached = before // BLOCK * BLOCK
        if key % 2:
            attempt.begun(NOW + 0.3, cached)
            assert known.known_tokens(chain(7)) == len(INSTRUCTIONS)
        work = ComputedWork(352.0, 0.4, ComputedTokens(16, 336.0 - cached, 0.3, 0.1, cached))
        attempt.answered(STAGES, None, NOW + 0.4, work=work)
        assert known.known_tokens(chain(7)) == len(INSTRUCTIONS)
    assert max(one.cost.pace.prefixes.share for one in fleet.offered("minilm", "1")) > 0.5
