"""The console's verdict: one word for the gateway's health, and findings that name each cause, worst first.

Findings come from the state as it is shown, never from numbers of their own, so the sentence on top and the table
below cannot disagree. Few requests prove nothing: shares are judged from `ENOUGH` requests on, and one or two late ones
are no finding. In a large fleet some device is always down, so a finding about targets counts them and names the worst
few, and is trouble only if so many are down that work has nowhere to go.

    trouble    requests are being lost, or would be: no target is up, or many requests are late or refused
    attention  the gateway serves, and a link, a target, a device, a condition or a rollout needs a look
    well       there is no finding
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from gateway.core.estimate.sliding_stats import WindowSummary
from gateway.core.fleet.link_health import WORST_FIRST, Health

Level = Literal["trouble", "attention"]
State = Literal["well", "attention", "trouble"]

ENOUGH: Final = 10  # requests in the rates' window
LATE_ATTENTION: Final = 0.02
LATE_TROUBLE: Final = 0.10
NAMED: Final = 3
MOST_FINDINGS: Final = 12
_MORE_THAN_CHANCE: Final = 2.5  # late requests
_WHAT: Final[Mapping[Health, str]] = {
    "down": "down",
    "suspect": "in doubt",
    "silent": "silent",
    "slow": "on a slow link",
}


class ConsoleFinding(NamedTuple):
    level: Level
    words: str
    about: str = ""  # the id of the target, if it is about one


class ConsoleVerdict(NamedTuple):
    state: State
    sentence: str
    findings: tuple[ConsoleFinding, ...]


class HealthFinding(NamedTuple):
    """A target whose link is not well."""

    target_id: str
    health: Health
    reason: str


def console_verdict(
    *,
    targets: int,
    unhealthy: Sequence[HealthFinding],
    total: WindowSummary,
    by_class: Iterable[tuple[str, WindowSummary]],
    unoffered: Sequence[str],
    overloaded: str,
    panic: bool,
    refused_devices: Sequence[str],
    others: Iterable[ConsoleFinding] = (),
    in_flight: int = 0,
) -> ConsoleVerdict:
    """Return the verdict with its findings, worst first.

    Args:
        targets: how many targets are known.
        unhealthy: the targets whose link is not well.
        unoffered: requested models that no target offers now.
        overloaded: why shedding is on; "" when it is not.
        refused_devices: devices that are not dialled.
        others: findings of other modules.
        in_flight: requests that have not ended: a generation may be the only one for minutes.
    """
    found = [
        *_of_targets(targets, unhealthy),
        *_of_models(unoffered),
        *_of_requests(total, by_class),
        *([ConsoleFinding("trouble", f"Overloaded, the least important are shed: {overloaded}")] if overloaded else []),
        *([ConsoleFinding("trouble", "Most targets fail, so all of them are used")] if panic else []),
        *_of_devices(refused_devices),
        *others,
    ]
    found.sort(key=lambda one: one.level != "trouble")
    del found[MOST_FINDINGS:]
    return ConsoleVerdict(_state(found), _sentence(found, idle=not (total.asked or in_flight)), tuple(found))


def _state(found: Sequence[ConsoleFinding]) -> State:
    return found[0].level if found else "well"


def _sentence(found: Sequence[ConsoleFinding], *, idle: bool) -> str:
    if found:
        more = len(found) - 1
        return found[0].words + (f", and {more} more" if more else "")
    return "All is well: nobody is asking just now" if idle else "All is well"


def _of_targets(targets: int, unhealthy: Sequence[HealthFinding]) -> list[ConsoleFinding]:
    if targets == 0:
        return [ConsoleFinding("trouble", "No target is known: nothing can be answered")]
    found = []
    for health in WORST_FIRST:
        alike = [one for one in unhealthy if one.health == health]
        if not alike:
            continue
        level: Level = "trouble" if health == "down" and 2 * len(alike) > targets else "attention"
        found.append(_about(level, alike, _WHAT[health], targets))
    if all(one.health == "down" for one in unhealthy) and len(unhealthy) == targets:
        return [ConsoleFinding("trouble", f"No target can be used: {_names(unhealthy)} {_are(unhealthy)} down")]
    return found


def _about(level: Level, unhealthy: Sequence[HealthFinding], what: str, targets: int) -> ConsoleFinding:
    if len(unhealthy) == 1:
        one = unhealthy[0]
        return ConsoleFinding(level, f"{one.target_id} is {what}: {one.reason}", one.target_id)
    return ConsoleFinding(
        level, f"{len(unhealthy)} of {targets} targets are {what}: {_names(unhealthy)}", unhealthy[0].target_id
    )


def _names(unhealthy: Sequence[HealthFinding]) -> str:
    named = ", ".join(one.target_id for one in unhealthy[:NAMED])
    more = len(unhealthy) - NAMED
    return f"{named} and {more} more" if more > 0 else named


def _are(unhealthy: Sequence[HealthFinding]) -> str:
    return "is" if len(unhealthy) == 1 else "are"


def _of_models(unoffered: Sequence[str]) -> list[ConsoleFinding]:
    if not unoffered:
        return []
    named = ", ".join(unoffered[:NAMED]) + (f" and {len(unoffered) - NAMED} more" if len(unoffered) > NAMED else "")
    return [ConsoleFinding("trouble", f"Nobody offers {named} just now")]


def _of_requests(total: WindowSummary, by_class: Iterable[tuple[str, WindowSummary]]) -> list[ConsoleFinding]:
    if total.rated < ENOUGH or total.late_share < LATE_ATTENTION or total.rated * total.late_share < _MORE_THAN_CHANCE:
        return []
    worst = max(
        ((name, recent.late_share) for name, recent in by_class if recent.rated >= ENOUGH),
        key=lambda one: one[1],
        default=None,
    )
    where = f", most of them of {worst[0]} ({worst[1]:.0%})" if worst and worst[1] > total.late_share else ""
    level: Level = "trouble" if total.late_share >= LATE_TROUBLE else "attention"
    return [ConsoleFinding(level, f"{_share(total.late_share)} of requests are late or fail{where}")]


def _share(share: float) -> str:
    return f"{share:.1%}" if share < LATE_TROUBLE else f"{share:.0%}"


def _of_devices(refused: Sequence[str]) -> list[ConsoleFinding]:
    if not refused:
        return []
    named = ", ".join(refused[:NAMED]) + (f" and {len(refused) - NAMED} more" if len(refused) > NAMED else "")
    are = "is" if len(refused) == 1 else "are"
    return [ConsoleFinding("attention", f"{named} {are} not dialled: the advertised address is not allowed")]
