"""The conditions of a device that its work affects beyond time: its battery, its heat, and its link's charges.

A device reports its conditions with every heartbeat; the gateway turns them into prices
(`gateway/core/fleet/pricing.py`). A device omits what it does not know, and an omitted condition costs nothing.
Everything here comes from the network, so the ranges are part of the types: a share is a share and a temperature is one
that a device could survive.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, field

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Celsius = Annotated[float, Meta(ge=-100.0, le=200.0)]
Bytes = Annotated[int, Meta(ge=0, le=2**53)]

MOST_ABSENT: Final = 8
ABSENT_CHARS: Final = 160
Mode = Literal["online", "control-lost", "cloud-lost", "isolated"]


class DeviceConditions(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device's state at one moment, as far as it knows it."""

    battery: Share | None = field(name="bat", default=None)  # None: it has none, or does not know
    charging: bool = field(name="chg", default=False)  # or on external power; means something with a battery only
    temperature_c: Celsius | None = field(name="t", default=None)
    throttled: bool = field(name="thr", default=False)  # it computes slower now, to cool down
    metered: bool = field(name="met", default=False)  # its link to the gateway is paid by the byte
    memory_bytes: Bytes | None = field(name="mem", default=None)  # resident, of its agent with all its workers
    memory_limit_bytes: Bytes | None = field(name="lim", default=None)  # the limit of that memory
    mode: Mode = "online"  # what the device can reach, as it sees it
    kept: Annotated[int, Meta(ge=0, le=2**31 - 1)] = field(name="sf", default=0)  # things stored for a gateway

    # How long its agent's event loop was held up in the last minute, while that costs deadlines.
    held_up_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = field(name="ll", default=0.0)

    unwritable: bool = field(name="nw", default=False)  # its disk takes nothing: full, read-only or broken

    # Models that it is to serve and cannot, each as "NAME: why"; the first of them.
    absent: Annotated[tuple[Annotated[str, Meta(max_length=ABSENT_CHARS)], ...], Meta(max_length=MOST_ABSENT)] = field(
        name="na", default=()
    )

    @property
    def on_battery(self) -> bool:
        return self.battery is not None and not self.charging

    def in_words(self) -> str:
        """What is out of the ordinary, for people; "" when nothing is."""
        words = []
        if self.battery is not None:
            words.append(f"battery at {self.battery:.0%}{', charging' if self.charging else ''}")
        if self.throttled:
            words.append("throttled" if self.temperature_c is None else f"throttled at {self.temperature_c:.0f} °C")
        if self.metered:
            words.append("metered link")
        if self.mode != "online":
            words.append(self.mode.replace("-", " "))
        if self.unwritable:
            words.append("disk takes no writes")
        if self.absent:
            words.append(f"not served: {', '.join(self.absent)}")
        if self.held_up_s:
            words.append(f"event loop held up for {self.held_up_s:.1f} s of the last minute")
        if self.kept:
            words.append(f"{self.kept} things kept for a gateway")
        return "; ".join(words)


UNTOLD: Final = DeviceConditions()
