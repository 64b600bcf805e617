"""Pricing turns a device's battery, heat and link and the cloud's budget into the price of work on a target.

A second of a pool in the cloud is the unit: all else is measured against it.

    cost          = price · compute_s + byte_price · (bytes of the request + bytes of the answer)

    price         = 0.01 · battery · heat                  of an edge: its compute is paid for already
                  = 1.00 · battery · heat                  of a pool, which has neither battery nor heat to report
                  = as its summary says                    of a site: its cheapest place's; 0.01 if unsaid
                  · scarcity                               in the cloud: `core/placement/cloud_budget.py`, else 1
    battery       = 1 + 24 · [1 − charge / 0.8]₊²          while it discharges; charging, unknown or mains: 1
                  · ailing                                 1.5 while memory runs out there: `core/health/degradation.py`
    heat          = 1 + 4 · [(°C − 65) / 20]²  in 0 … 1    throttled counts as 85 °C; unknown: 1
    byte_price    = 4e-6                                   over a metered link, else 0

A server of another maker may be paid by tokens. What they cost is its cost, instead of its time:

    cost          = scarcity · (token price of the prompt + of the answer's most tokens)    in seconds of a pool

So a full battery costs nothing extra, one at 20 % makes a device's second some 14 times as dear (a seventh of the
pool's), and an empty one 25 times. Below its own `min_battery` a device takes no new work at all and says so itself.
A throttled device is slower besides, which its measured times show; its price says that working on heats it more. Both
terms are smooth, so a device that gets weaker loses its work bit by bit, not all of it to a neighbour at once.

A megabyte of mobile data is taken to cost what 4 seconds of a pool do (2 $ a GB, 2 $ an hour). The gateway counts the
bytes of the tensors; what frames add is left out.

These are tastes, not measurements, and every one is a default: what matters is that each term grows with what it
stands for (monotone: `test_gateway_prices`), and that none can make a price negative or endless.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from tidegate.fleet.conditions import UNTOLD, DeviceConditions

Tier = Literal["edge", "pool", "site"]


class TokenPrice(NamedTuple):
    """What a token costs, in seconds of a pool; all 0 where only time has a price."""

    prompt: float = 0.0
    answer: float = 0.0

    @classmethod
    def of_money(cls, prompt_per_million: float, answer_per_million: float, pool_per_hour: float) -> TokenPrice:
        """The price of tokens where a pool costs so much, all in the same currency."""
        per_token = 1.0 / 1e6 / (pool_per_hour / 3600.0)
        return cls(prompt_per_million * per_token, answer_per_million * per_token)

    @property
    def is_free(self) -> bool:
        """Whether tokens have no price, and time has one."""
        return not (self.prompt or self.answer)

    def of(self, prompt_tokens: float, answer_tokens: float) -> float:
        """What a generation costs, in seconds of a pool."""
        return self.prompt * prompt_tokens + self.answer * answer_tokens


FREE: Final = TokenPrice()

TIER: Final[dict[Tier, float]] = {"edge": 0.01, "pool": 1.0, "site": 0.01}
METERED_BYTE: Final = 4e-6

_BATTERY_TIMES: Final = 24.0
_PLENTY: Final = 0.8  # of the battery: above it the price is the plain one
_HEAT_TIMES: Final = 4.0
_WARM_C: Final = 65.0
_HOT_C: Final = 85.0  # where small boards begin to throttle


def price_of(
    tier: Tier, conditions: DeviceConditions = UNTOLD, scarcity: float = 1.0, *, hot: bool = False, ailing: float = 1.0
) -> float:
    """What a second of compute costs on a target of this tier, in this state.

    Args:
        scarcity: the cloud's, at least 1.
        hot, ailing: what its conditions make of it (`gateway/core/health/degradation.py`).
    """
    return TIER[tier] * battery_factor(conditions) * heat_factor(conditions, hot=hot) * scarcity * ailing


def byte_price_of(conditions: DeviceConditions) -> float:
    """What a byte costs on the way to the target or back."""
    return METERED_BYTE if conditions.metered else 0.0


def battery_factor(conditions: DeviceConditions) -> float:
    share = conditions.battery
    if share is None or not conditions.on_battery:
        return 1.0
    missing = max(0.0, 1.0 - share / _PLENTY)
    return 1.0 + _BATTERY_TIMES * missing * missing


def heat_factor(conditions: DeviceConditions, *, hot: bool = False) -> float:
    """`hot`: it has been called too hot, and not yet cool again: as good as throttled until then."""
    warmth = 1.0 if conditions.throttled or hot else 0.0
    if conditions.temperature_c is not None:
        warmth = max(warmth, min(1.0, (conditions.temperature_c - _WARM_C) / (_HOT_C - _WARM_C)))
    return 1.0 + _HEAT_TIMES * warmth * warmth
