"""Device conditions are parsed from sysfs: battery, heat and throttling, and whether the device takes new work.

The kernel exposes them as small text files: a folder for each power supply, thermal zone and cooling device under
`/sys/class`. `edge_agent/device/sensors.py` reads the files; their texts are parsed here, so every odd output of a
driver is a dictionary in a test.

    battery      mean share of the system's own batteries (a mouse's is none: scope "Device")
    charging     no battery says Discharging, and one says otherwise or a mains adapter is online
    temperature  the hottest zone that names a processor; without such a zone, the hottest of all
    throttled    a processor's cooling device (not a fan) is at work

A driver that gives no number, or an impossible one, is ignored. A device on its battery below `min_battery` takes no
new work, nor does one that is hotter than `max_temperature_c` until it has cooled; what it has taken is finished. Below
that, a throttled processor costs more in the gateway's placement, and so gets less work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Final

from tidegate.fleet.conditions import ABSENT_CHARS, MOST_ABSENT, DeviceConditions

Attributes = Mapping[str, str]  # file name → text, of one folder of sysfs

_PROCESSORS: Final = ("cpu", "x86_pkg", "soc", "core", "package", "tdie", "tctl", "processor")
_THROTTLES: Final = ("processor", "cpufreq", "cpu-freq", "thermal-cpu", "devfreq", "cpu_throttle")
_EXTERNAL: Final = ("Mains", "USB", "Wireless", "UPS")
COOLER_BY_C: Final = 5.0
_HOTTEST_C: Final = 200.0
_COLDEST_C: Final = -100.0


def conditions_of(
    supplies: Iterable[Attributes], zones: Iterable[Attributes], coolers: Iterable[Attributes], *, metered: bool
) -> DeviceConditions:
    """The conditions that the folders `power_supply`, `thermal_zone*` and `cooling_device*` describe together."""
    supplies = list(supplies)
    batteries = [one for one in supplies if one.get("type") == "Battery" and one.get("scope") != "Device"]
    shares = [share for one in batteries if (share := _share(one)) is not None]
    temperature_c = _temperature_c(list(zones))
    return DeviceConditions(
        battery=round(fmean(shares), 2) if shares else None,
        charging=bool(shares) and _is_charging(batteries, supplies),
        temperature_c=None if temperature_c is None else round(temperature_c, 1),
        throttled=any(_is_throttling(one) for one in coolers),
        metered=metered,
    )


def exhaustion_reason(conditions: DeviceConditions, min_battery: float) -> str:
    """Why the device takes no new work; "" when it does."""
    share = conditions.battery
    if share is None or not conditions.on_battery or share >= min_battery:
        return ""
    return f"its battery is at {share:.0%} and discharging, below min_battery {min_battery:.0%}"


class Endurance:
    """Mutable: whether the device takes work; after heat it must first cool by COOLER_BY_C degrees.

    Args:
        min_battery: share below which a discharging device takes no new work.
        max_temperature_c: temperature at which it takes none; None: only the kernel throttles.
    """

    def __init__(self, min_battery: float, max_temperature_c: float | None) -> None:
        self._min_battery = min_battery
        self._max_temperature_c = max_temperature_c
        self._too_hot = False

    def limit(self, min_battery: float, max_temperature_c: float | None) -> None:
        """Judge by these limits from now on."""
        self._min_battery, self._max_temperature_c = min_battery, max_temperature_c

    def why_not(self, conditions: DeviceConditions) -> str:
        """Why the device takes no new work; "" when it does."""
        return self._heat(conditions.temperature_c) or exhaustion_reason(conditions, self._min_battery)

    def _heat(self, temperature_c: float | None) -> str:
        limit_c = self._max_temperature_c
        if limit_c is None or temperature_c is None:
            self._too_hot = False
            return ""
        self._too_hot = temperature_c >= (limit_c - COOLER_BY_C if self._too_hot else limit_c)
        if not self._too_hot:
            return ""
        return (
            f"it is at {temperature_c:.0f} °C: max_temperature_c is {limit_c:g}, and it goes on {COOLER_BY_C:g} below"
        )

    def __repr__(self) -> str:
        return f"<Endurance {'too hot' if self._too_hot else 'goes on'}>"


def absent_in_words(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """What a heartbeat says of models that are to be served here and cannot be: as much as it has room for."""
    told = [f"{model}: {' '.join(reason.split())}" for model, reason in sorted(reasons.items())[:MOST_ABSENT]]
    return tuple(words if len(words) <= ABSENT_CHARS else f"{words[: ABSENT_CHARS - 1]}…" for words in told)


def urgent_conditions(conditions: DeviceConditions) -> tuple[object, ...]:
    """Conditions whose change must not wait for the next heartbeat: all but degrees, the battery by tenths."""
    tenths = None if conditions.battery is None else int(conditions.battery * 10.0)
    held_up = conditions.held_up_s > 0.0
    return (
        tenths, conditions.charging, conditions.throttled, conditions.metered, conditions.mode, conditions.unwritable,
        held_up, conditions.absent,
    )  # fmt: skip


def _share(battery: Attributes) -> float | None:
    percent = _number(battery.get("capacity"))
    if percent is None:
        for now, full in (("energy_now", "energy_full"), ("charge_now", "charge_full")):
            have, most = _number(battery.get(now)), _number(battery.get(full))
            if have is not None and most:
                percent = 100.0 * have / most
    return None if percent is None else min(1.0, max(0.0, percent / 100.0))


def _is_charging(batteries: Iterable[Attributes], supplies: Iterable[Attributes]) -> bool:
    words = {one.get("status", "Unknown") for one in batteries}
    if "Discharging" in words:
        return False  # also on a charger that is too weak
    if words - {"Unknown"}:
        return True
    return any(one.get("type") in _EXTERNAL and one.get("online") == "1" for one in supplies)


def _temperature_c(zones: list[Attributes]) -> float | None:
    processors = [one for one in zones if any(name in one.get("type", "").lower() for name in _PROCESSORS)]
    for some in (processors, zones):
        degrees = [milli / 1e3 for one in some if (milli := _number(one.get("temp"))) is not None]
        plausible = [one for one in degrees if _COLDEST_C < one < _HOTTEST_C]
        if plausible:
            return max(plausible)
    return None


def _is_throttling(cooler: Attributes) -> bool:
    kind = cooler.get("type", "").lower()
    return any(name in kind for name in _THROTTLES) and (_number(cooler.get("cur_state")) or 0.0) > 0.0


def _number(text: str | None) -> float | None:
    if text is None or len(text) > 20:
        return None
    try:
        return float(int(text))
    except ValueError:
        return None
