"""Where a request should be computed: the cheapest target that is predicted to make the deadline.

For each variant that takes the work on each usable target:

    finish = link round trip + wait in its queue + compute       margin = 1.645 · spread (a 95 % answer)

`spread` adds up what is uncertain: the compute's log-residual, the link's jitter and a share of the wait. Those with
finish + margin within the budget are sure enough, and the cheapest of them is chosen (price × compute). Targets of the
same price share the work by earliest predicted finish: always taking the very cheapest would queue everything at one
edge while its twin idles. When none is sure enough, the earliest finish has the best chance. Nobody is sure whose link
is silent, that is whose ack is overdue: two frozen edges would otherwise hedge each other until no time is left.

A request is refused before anything is spent when nobody can take it (`NothingAlive`, with each target's reason) or
when even an optimist sees no way (`DeadlineExceeded`): that needs proof from measured tables, a prior is none.

A policy chooses among candidates and sees nothing else, so `always_edge`, `always_cloud` and `random_choice` stand in
the same place in benches. Candidates are plain numbers: a decision explains itself when asked, and costs nothing more
when it is not.

It can be wrong: margins of the parts are taken as independent, and other gateways' launches show up only in reports.
Source: routing.md B3, without its calibration and externality terms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import erf, sqrt
from typing import Final, NamedTuple

from gateway.core.calibration import Prediction
from gateway.core.fleet import Fleet, Offered, TargetView
from gateway.core.harm import Place
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import DeadlineExceeded, NothingAlive, ServeError

_SIGMAS: Final = 1.645
_WAIT_SPREAD: Final = 0.3  # of the wait, and ...
_FLOOR_SPREAD_S: Final = 0.001  # ... a timer's worth on top: routing.md B3 has 6 ms for a 20 ms LAN


class Ask(NamedTuple):
    """What placement needs to know of a request."""

    model: str
    version: str
    units: float
    rows: int
    longest_row: int
    deadline: float
    variant: str = ""  # demanded, by name or precision; "" takes any
    priority: int = 0  # OIP's: 1 is highest, 0 means the default
    body_bytes: int = 0
    min_quality: float = 0.0  # a variant that is worse, or whose quality nobody measured, does not do


class Stake(NamedTuple):
    """What a policy with chances has at stake in its choice: the claim it made, and the place in the queue it took."""

    prediction: Prediction
    place: Place


class Candidate(NamedTuple):
    """One possible place with its predictions, in seconds."""

    offered: Offered
    compute_s: float
    wait_s: float
    link_s: float
    margin_s: float
    finish_s: float  # link + wait + compute
    cost: float  # price × compute
    trust: float = 1.0  # that the path works now; below 1 while an attempt waits for its ack too long
    stake: Stake | None = None  # set on the chosen one, by policies that have one

    @property
    def target(self) -> TargetView:
        return self.offered.target

    @property
    def variant(self) -> VariantOffer:
        return self.offered.variant


class Judged(NamedTuple):
    """What a policy that deals in chances found of one candidate."""

    chance: float  # raw
    claimed: float  # calibrated
    harm: float  # to those that it would pass
    value: float


class Choice(NamedTuple):
    """A policy's choice. `judged` is empty, or goes with the candidates one by one; None: it could not have won."""

    candidate: Candidate
    reason: str
    judged: Sequence[Judged | None] = ()


class Decision(NamedTuple):
    """What was decided and on what ground. Exactly one of `chosen` and `refusal` is set."""

    at: float
    ask: Ask
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    reason: str
    refusal: ServeError | None
    judged: Sequence[Judged | None] = ()

    def best_other(self) -> Candidate | None:
        """The earliest finish on another target that is trusted: whom a hedge would ask."""
        if self.chosen is None or len(self.candidates) < 2:
            return None
        best, taken = None, self.chosen.offered.target
        for one in self.candidates:
            if one.offered.target is not taken and (best is None or _is_sooner(one, best)):
                best = one
        return best


Policy = Callable[[Sequence[Candidate], float], tuple[Candidate, str]]


def cheapest(candidates: Sequence[Candidate], budget_s: float) -> tuple[Candidate, str]:
    """The rule: cheapest of the sure ones, else the earliest finish. A link is distrusted while it is silent."""
    # Plain loops: this runs for every request, and `min` with a key costs twice as much.
    fastest = bargain = candidates[0]
    cheap: Candidate | None = None
    for one in candidates:
        if _is_sooner(one, fastest):
            fastest = one
        if one.cost < bargain.cost:
            bargain = one
        if _is_sure(one, budget_s) and (cheap is None or one.cost < cheap.cost):
            cheap = one
    if cheap is None:
        return fastest, "faster"
    chosen, price = cheap, cheap.offered.price
    for one in candidates:
        if one.offered.price == price and one.finish_s < chosen.finish_s and _is_sure(one, budget_s):
            chosen = one
    return chosen, "cheapest" if bargain.offered.price == price else "faster"


def _is_sure(candidate: Candidate, budget_s: float) -> bool:
    return candidate.finish_s + candidate.margin_s <= budget_s and candidate.trust == 1.0


def _is_sooner(candidate: Candidate, than: Candidate) -> bool:
    """More trusted, or as much and sooner: frozen targets would otherwise hedge each other."""
    if candidate.trust != than.trust:
        return candidate.trust > than.trust
    return candidate.finish_s < than.finish_s


def always_edge(candidates: Sequence[Candidate], budget_s: float) -> tuple[Candidate, str]:
    """A baseline: an edge whenever one takes the work, deadlines or not."""
    return _earliest_of_tier("edge", candidates)


def always_cloud(candidates: Sequence[Candidate], budget_s: float) -> tuple[Candidate, str]:
    """A baseline: the pool whenever it takes the work."""
    return _earliest_of_tier("pool", candidates)


def random_choice(draw: Callable[[], float]) -> Policy:
    """A baseline: any candidate. `draw` is uniform in [0, 1)."""

    def choose(candidates: Sequence[Candidate], budget_s: float) -> tuple[Candidate, str]:
        return candidates[int(draw() * len(candidates))], "random"

    return choose


class Placer:
    """Places asks by a policy over the fleet's view."""

    def __init__(self, fleet: Fleet, policy: Policy = cheapest) -> None:
        self.fleet = fleet
        self._policy = policy

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        """Where `ask` should go now, leaving out the targets in `exclude` (they had their chance)."""
        budget_s = ask.deadline - now
        candidates = self._candidates(ask, now, exclude)
        if not candidates:
            return Decision(now, ask, (), None, "", NothingAlive(why_nobody(self.fleet, ask, now, exclude)))
        chosen, reason, judged = self.choose(candidates, ask, now)
        # Only where the prediction is too late can the proof be: a floor is below its prediction.
        if chosen.finish_s > budget_s and (floor_s := _floor_s(candidates, ask.units)) > budget_s:
            return Decision(now, ask, candidates, None, "", _infeasible(floor_s, budget_s), judged)
        if ask.variant:
            reason = "demanded"
        elif len(candidates) == 1:
            reason = "only"
        return Decision(now, ask, candidates, chosen, reason, None, judged)

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Choice:
        """The best of the candidates, of which there is at least one."""
        return Choice(*self._policy(candidates, ask.deadline - now))

    def _candidates(self, ask: Ask, now: float, exclude: Collection[str]) -> tuple[Candidate, ...]:
        return tuple(
            [
                estimate(offered, ask.units, now, ask.body_bytes)
                for offered in self.fleet.offered(ask.model, ask.version)
                if not misfit(offered.variant, ask)
                and offered.target.breaker.allows(now)
                and not (exclude and offered.target.id in exclude)
            ]
        )


def estimate(offered: Offered, units: float, now: float, body_bytes: int = 0) -> Candidate:
    """The predictions for `units` of work in a body of this size on one offered variant."""
    target, cost = offered.target, offered.cost
    compute_s = cost.predict_s(units)
    wait_s = target.ledger.wait_s(now)
    link_s = target.link.rtt_s + body_bytes * target.link.s_per_byte
    spread_s = sqrt(
        (compute_s * cost.sigma) ** 2
        + (_WAIT_SPREAD * wait_s) ** 2
        + target.link.jitter_s**2
        + _FLOOR_SPREAD_S * _FLOOR_SPREAD_S
    )
    return Candidate(
        offered,
        compute_s,
        wait_s,
        link_s,
        _SIGMAS * spread_s,
        link_s + wait_s + compute_s,
        offered.price * compute_s,
        target.link.trust(now),
    )


def implied_chance(candidate: Candidate, budget_s: float) -> float:
    """The chance of being in time that finish and margin stand for. For explanations: nothing is decided by it."""
    spread_s = candidate.margin_s / _SIGMAS
    return 0.5 + 0.5 * erf((budget_s - candidate.finish_s) / (spread_s * sqrt(2.0)))


def misfit(variant: VariantOffer, ask: Ask) -> str:
    """Why the variant does not take the work; "" when it does."""
    if variant.max_batch is not None and ask.rows > variant.max_batch:
        return f"takes at most {variant.max_batch} rows"
    if variant.max_tokens is not None and ask.longest_row > variant.max_tokens:
        return f"takes rows of at most {variant.max_tokens}"
    if ask.variant and ask.variant not in (variant.name, variant.precision):
        return f"has {variant.name}"
    if ask.min_quality and (variant.quality is None or variant.quality < ask.min_quality):
        return (
            f"has {variant.name} of {'unknown quality' if variant.quality is None else f'quality {variant.quality:g}'}"
        )
    return ""


def why_nobody(fleet: Fleet, ask: Ask, now: float, exclude: Collection[str]) -> str:
    """One sentence for the caller: what was asked for, and each target's reason for not taking it."""
    wanted = f"{ask.model} in variant {ask.variant}" if ask.variant else ask.model
    size = f"{ask.rows} row{'s' if ask.rows != 1 else ''} × {ask.longest_row}"
    reasons = [reason for target in fleet.targets.values() if (reason := _why_not(target, ask, now, exclude))]
    return f"no target offers {wanted} for {size}: " + ("; ".join(reasons) or "there are no targets")


def _why_not(target: TargetView, ask: Ask, now: float, exclude: Collection[str]) -> str:
    state, reason = target.state(now)
    if target.id in exclude:
        return f"{target.id} was tried"
    if state == "down":
        return f"{target.id} is down since {now - target.since:.1f} s: {reason}"
    model = next((one for one in target.offers if (one.name, one.version) == (ask.model, ask.version)), None)
    if model is None:
        return f"{target.id} does not offer it"
    if model.state != "ready":
        return f"{target.id} has it in state {model.state}"
    misfits = [why for variant in model.variants if (why := misfit(variant, ask))]
    return f"{target.id} {', '.join(misfits)}" if misfits else f"{target.id} is {state}: {reason}"


def _floor_s(candidates: Sequence[Candidate], units: float) -> float:
    return min(one.offered.cost.floor_s(units) for one in candidates)


def _infeasible(floor_s: float, budget_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"infeasible: even the fastest target needs {floor_s * 1e3:.0f} ms of compute for this work, "
        f"and {budget_s * 1e3:.0f} ms of the budget are left"
    )


def _earliest_of_tier(tier: str, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    of_tier = [one for one in candidates if one.offered.target.spec.tier == tier]
    return min(of_tier or candidates, key=_finish), f"always-{tier}"


def _finish(candidate: Candidate) -> float:
    return candidate.finish_s
