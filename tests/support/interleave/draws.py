"""What chance may draw in a `World`: the options of each step, and what a world is built of.

Every draw is one of few options, picked by a number in [0, 1): so rare values (a promise of infinity, a round trip of
nothing, a budget that is over) come up as often as usual ones, and a case that fails shrinks to plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from typing import Final, Literal, NamedTuple, TypeVar

from gateway.core.admission.tenants import TenantSpec
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import ERRORS, Disconnected, InternalError, PeerError, ServeError
from tidegate.placement_pin import Pin

T = TypeVar("T")
PolicyName = Literal["cheapest", "value"]
MOST_LIVES: Final = 12
MOST_TARGETS: Final = 5
REMEMBERED: Final = 16  # ended attempts of which news may still come
MODEL: Final = "m"
PAUSES_S: Final = (0.0, 0.0, 0.0001, 0.0005, 0.001, 0.004, 0.01, 0.04, 0.4)  # the last: breakers cool
BUDGETS_S: Final = (0.0, 0.0015, 0.03, 0.08, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.2, 1.6, 2.0, 3.0)
PROMISES_S: Final = (0.0, 0.01, 0.05, 0.2, 1.0, 60.0, -1.0, inf, nan)
DELAYS_S: Final = (0.0, 0.001, 0.01, 0.05, 0.2, 2.0, -1.0)
SURE: Final = 0.5
CONFIDENCES: Final = (None, 0.0, 0.3, 0.49, SURE, 0.9)
RTTS_S: Final = (0.0, 0.0005, 0.002, 0.01, 0.05, 0.4, -0.001)
FAILURES: Final[tuple[ServeError, ...]] = (
    *[error("as an error of its class") for error in ERRORS],
    *[error("with advice", retry_after_s=0.1) for error in ERRORS[3:6]],
    Disconnected("the connection ended"),
)
FAULTS: Final = tuple(error for error in FAILURES if isinstance(error, PeerError | InternalError))
TABLE: Final = ((1.0, 0.004), (32.0, 0.02), (512.0, 0.3))
VARIANTS: Final = (
    VariantOffer("int8", "int8", TABLE, 8, 512, 0.97),
    VariantOffer("int8", "int8", ((1.0, 0.010),), None, None, 0.9),
    VariantOffer("fp32", "fp32", tuple((units, 0.4 * seconds) for units, seconds in TABLE), None, None, 1.0),
    VariantOffer("fp32", "fp32", ((1.0, 0.2), (64.0, 0.6)), 2, 64, 1.0),
    VariantOffer("fp16", "fp16"),  # a foreign one: nothing measured
)
PINS: Final[tuple[Pin, ...]] = ("any", "any", "any", "any", "any", "any", "site", "edge")
HOSTS: Final = ("10.0.0.1:1", "10.0.0.2:1", "10.0.0.2:2", "127.0.0.1:1", "simulated")
TENANTS: Final = {  # anybody else shares the purse of `default`
    "default": TenantSpec(),
    "clinic": TenantSpec(weight=2.0, pool_s_per_s=0.5, burst_s=0.5),
    "crawler": TenantSpec(pool_s_per_s=0.05, edge_s_per_s=0.05, burst_s=0.05, max_in_flight=4),
    "guest": TenantSpec(weight=0.5, pool_s_per_s=0.0, edge_s_per_s=0.2, burst_s=0.2),
}
CALLERS: Final = ("", "clinic", "clinic", "crawler", "crawler", "guest", "who knows")


class Profile(NamedTuple):
    """What a world is built of."""

    policy: PolicyName = "value"
    targets: int = 3
    max_attempts: int = 3
    share: float = 0.05
    cap: float = 30.0
    escalated: float = 0.0  # the most of a model's answers that are; 0: nobody judges them
    hopeful: bool = False  # placement never says that it is too late: then the machine has to
    places: int = 0  # for so many at once behind a door with tenants and budgets; 0: there is no door


def profile_of(x: float, y: float, z: float) -> Profile:
    """A profile out of three numbers in [0, 1)."""
    policy: PolicyName = "cheapest" if x < 0.35 else "value"
    share, cap = pick(((0.05, 30.0), (0.05, 3.0), (0.5, 1.0)), y)
    escalated = pick((0.0, 0.0, 0.1, 0.5), again(x))
    return Profile(
        policy,
        1 + int(z * MOST_TARGETS),
        pick((1, 2, 3, 3, 3), again(z)),
        share,
        cap,
        escalated,
        again(y) < 0.1,
        pick((0, 0, 4, 100), again(z, 31)),
    )


def pick(options: Sequence[T], x: float) -> T:
    """One of the options, for `x` in [0, 1)."""
    return options[int(x * len(options))]


def again(x: float, times: int = 97) -> float:
    """Another number in [0, 1) out of the same one."""
    return x * times % 1.0


def variants_of(y: float, z: float) -> tuple[VariantOffer, ...]:
    """One variant or two of different names."""
    first, second = pick(VARIANTS, y), pick(VARIANTS, z)
    return (first,) if first.name == second.name else (first, second)
