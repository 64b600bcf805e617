"""Eligibility decides whether an offer may take a request at all, by the rules that no price outweighs.

    pin           the target's zone is inside of the pin                                  a promise to the caller
    attestation   where it is required, the target's evidence is good until the deadline  a promise to the caller
    target        the target is usable now: by its breakers, or because a probe is due    `usable`, an argument
    variant       the variant takes so many and so long rows, and is what was demanded
    deferred      the variant is not meant for such requests just now, or is demoted (`variant_rank.py`)

The first two hold for every choice of a target: the first attempt, a fallback, a hedge, an escalation, a probe and the
fallback placer. The last one is no misfit: where no other variant takes the request, a deferred one does, so callers
ask twice, the second time with `deferred=True`.

`Placer` asks this of every offer for every request, and has the rules spelled out in its loop for speed.
tests/gateway/core/placement/test_eligibility.py holds that loop, and each other use, to `ineligible` over random
fleets.

`no_candidate_reason` says the same to the caller of a request that no target may take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import Final, NamedTuple

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.target import TargetView
from gateway.core.fleet.variant_rank import deferred_to
from gateway.core.placement.ask import Ask
from tidegate.fleet.offers import VariantOffer
from tidegate.placement_pin import INSIDE

UsableTest = Callable[[TargetView, float], bool]

_MOST_REASONS: Final = 16  # targets that a refusal explains; a fleet may have ten thousand


class Ineligibility(NamedTuple):
    """The rule by which an offer may not take a request, with the reason in words."""

    rule: str  # pin, attestation, target, variant or deferred, as above
    why: str


def ineligible(
    target: TargetView,
    variant: VariantOffer,
    ask: Ask,
    now: float,
    *,
    usable: UsableTest = TargetView.takes,
    deferred: bool = False,
) -> Ineligibility | None:
    """Why this variant on this target may not take the request; None when it may.

    Args:
        usable: whether the target may be sent a request now: by default as a matter of course, else as a probe.
        deferred: whether a variant that is deferred will do.
    """
    excluded = target_ineligible(target, ask, now, usable=usable)
    return excluded or variant_ineligible(variant, ask, deferred=deferred)


def target_ineligible(
    target: TargetView, ask: Ask, now: float, *, usable: UsableTest = TargetView.takes
) -> Ineligibility | None:
    """Why nothing on this target may take the request."""
    broken = broken_promise(target, ask)
    if broken is not None:
        return broken
    return None if usable(target, now) else Ineligibility("target", "it is not usable now")


def broken_promise(target: TargetView, ask: Ask) -> Ineligibility | None:
    """The promise to the caller, pin or attestation, that this target would break, whatever its state."""
    zone = target.spec.lies_in
    if zone not in INSIDE[ask.pin]:
        return Ineligibility("pin", f"outside of the pin {ask.pin}, in zone {zone}")
    if ask.attested and (missing := target.attestation.why_not_valid_at(ask.deadline)):
        return Ineligibility("attestation", f"not attested: {missing}")
    return None


def variant_ineligible(variant: VariantOffer, ask: Ask, *, deferred: bool = False) -> Ineligibility | None:
    """Why this variant may not take the request on any target."""
    if misfit := variant_misfit(variant, ask):
        return Ineligibility("variant", misfit)
    if not deferred and deferred_to(variant, ask.variant, ask.min_quality):
        return Ineligibility("deferred", f"{variant.name} stands aside there just now ({variant.standing})")
    return None


def variant_misfit(variant: VariantOffer, ask: Ask) -> str:
    """Why the variant does not take the work; "" when it does."""
    if variant.max_batch is not None and ask.rows > variant.max_batch:
        return f"takes at most {variant.max_batch} rows"
    if variant.max_tokens is not None and ask.longest_row > variant.max_tokens:
        return f"takes rows of at most {variant.max_tokens}"
    if ask.variant and ask.variant not in (variant.name, variant.precision):
        return f"has {variant.name}"
    if ask.min_quality and (variant.quality is None or variant.quality < ask.min_quality):
        quality = "unknown quality" if variant.quality is None else f"quality {variant.quality:g}"
        return f"has {variant.name} of {quality}"
    if ask.schema and not variant.schemas:
        return f"has {variant.name}, which follows no JSON schema"
    if ask.ids and variant.grade != "ids":
        return f"has {variant.name}, which takes and gives text, and this request needs token ids"
    if ask.begun and not variant.resumable:
        return f"has {variant.name}, which cannot go on with an answer that has begun"
    return ""


def no_candidate_reason(fleet: Fleet, ask: Ask, now: float, exclude: Collection[str]) -> str:
    """One sentence for the caller: what was asked for, and each target's reason for not taking it."""
    wanted = f"{ask.model} version {ask.version}"
    if ask.variant:
        wanted += f" in variant {ask.variant}"
    if ask.min_quality:
        wanted += f" of quality {ask.min_quality:g}"
    if ask.schema:
        wanted += " by a JSON schema"
    if ask.pin != "any":
        wanted += f" pinned to {ask.pin}"
    if ask.attested:
        wanted += " attested"
    size = f"{ask.rows} row{'s' if ask.rows != 1 else ''} × {ask.longest_row}"
    some = islice(fleet.targets.values(), _MOST_REASONS)
    reasons = [_target_reason(target, ask, now, exclude) for target in some]
    if (more := len(fleet.targets) - _MOST_REASONS) > 0:
        reasons.append(f"and {more} more")
    others = ", ".join(one for one in sorted(fleet.served_versions(ask.model)) if one != ask.version)
    on_offer = f"; versions on offer: {others}" if others else ""
    return f"no target offers {wanted} for {size}: " + ("; ".join(reasons) or "there are no targets") + on_offer


def _target_reason(target: TargetView, ask: Ask, now: float, exclude: Collection[str]) -> str:
    """What the caller is told of this target. What the caller can change comes first, evidence after the state."""
    broken = broken_promise(target, ask)
    if broken is not None and broken.rule == "pin":
        return f"{target.id} is outside of the pin, in zone {target.spec.lies_in}"
    if target.id in ask.left_out:
        return f"{target.id} is not for this request"
    if ask.home not in ("", target.id):
        return f"{target.id} knows nothing of this sequence"
    if target.id in exclude:
        return f"{target.id} was tried"
    state, reason = target.state(now)
    if state == "down":
        return f"{target.id} is down since {now - target.since:.1f} s: {reason}"
    model = next((one for one in target.offers if (one.name, one.version) == (ask.model, ask.version)), None)
    if model is None:
        return f"{target.id} does not offer it"
    if model.state != "ready":
        return f"{target.id} has it in state {model.state}"
    if broken is not None:
        return f"{target.id} is {broken.why}"
    misfits = [why for variant in model.variants if (why := variant_misfit(variant, ask))]
    return f"{target.id} {', '.join(misfits)}" if misfits else f"{target.id} is {state}: {reason}"
