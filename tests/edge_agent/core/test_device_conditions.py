"""Device conditions are parsed from the kernel's files, and decide when a device takes no new work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.device_conditions import Attributes, conditions_of, exhaustion_reason, urgent_conditions
from tidegate.fleet.conditions import UNTOLD, DeviceConditions


def supplies(*folders: Attributes) -> DeviceConditions:
    return conditions_of(folders, [], [], metered=False)


def heat(zones: list[Attributes], coolers: list[Attributes] | None = None) -> DeviceConditions:
    return conditions_of([], zones, coolers or [], metered=False)


BATTERY = {"type": "Battery", "status": "Discharging", "capacity": "42"}
MAINS = {"type": "Mains", "online": "1"}


@pytest.mark.parametrize(("folders", "battery", "charging"), [
    ([], None, False),
    ([MAINS], None, False),
    ([BATTERY], 0.42, False),
    ([BATTERY | {"status": "Charging"}], 0.42, True),
    ([BATTERY | {"status": "Full", "capacity": "100"}], 1.0, True),
    ([BATTERY | {"status": "Not charging"}], 0.42, True),
    ([BATTERY, MAINS], 0.42, False),  # a charger that is too weak
    ([BATTERY | {"status": "Unknown"}, MAINS], 0.42, True),
    ([BATTERY | {"status": "Unknown"}, MAINS | {"online": "0"}], 0.42, False),
    ([BATTERY, BATTERY | {"capacity": "58"}], 0.5, False),
    ([BATTERY | {"scope": "Device"}], None, False),  # a mouse's
    ([{"type": "Battery", "energy_now": "20", "energy_full": "80"}], 0.25, False),
    ([{"type": "Battery", "charge_now": "20", "charge_full": "80"}], 0.25, False),
    ([{"type": "Battery", "energy_now": "20", "energy_full": "0"}], None, False),
    ([BATTERY | {"capacity": "full"}], None, False),
    ([BATTERY | {"capacity": "9" * 30}], None, False),
    ([BATTERY | {"capacity": "104"}], 1.0, False),
])  # fmt: skip
def test_a_battery_is_read_as_its_driver_tells_it(
    folders: list[Attributes], battery: float | None, charging: bool
) -> None:
    found = supplies(*folders)
    assert (found.battery, found.charging) == (battery, charging)


@pytest.mark.parametrize(("zones", "temperature_c"), [
    ([], None),
    ([{"type": "cpu-thermal", "temp": "51234"}], 51.2),
    ([{"type": "cpu-thermal", "temp": "51000"}, {"type": "battery", "temp": "60000"}], 51.0),
    ([{"type": "acpitz", "temp": "40000"}, {"type": "iwlwifi", "temp": "45000"}], 45.0),
    ([{"type": "cpu-thermal", "temp": "999999"}, {"type": "acpitz", "temp": "40000"}], 40.0),
    ([{"type": "cpu-thermal"}, {"temp": "-274000"}], None),
])  # fmt: skip
def test_the_hottest_processor_counts_and_impossible_degrees_do_not(
    zones: list[Attributes], temperature_c: float | None
) -> None:
    assert heat(zones).temperature_c == temperature_c


@pytest.mark.parametrize(("cooler", "throttled"), [
    ({"type": "Processor", "cur_state": "3"}, True),
    ({"type": "cpufreq-cpu0", "cur_state": "1"}, True),
    ({"type": "Processor", "cur_state": "0"}, False),
    ({"type": "intel_powerclamp", "cur_state": "-1"}, False),
    ({"type": "pwm-fan", "cur_state": "4"}, False),
    ({"type": "Processor"}, False),
    ({}, False),
])  # fmt: skip
def test_a_processor_that_is_cooled_by_slowing_it_is_throttled(cooler: Attributes, throttled: bool) -> None:
    assert heat([], [cooler]).throttled is throttled


@pytest.mark.parametrize(("conditions", "spares_itself"), [
    (UNTOLD, False),
    (DeviceConditions(battery=0.2), False),
    (DeviceConditions(battery=0.19), True),
    (DeviceConditions(battery=0.01, charging=True), False),
])  # fmt: skip
def test_below_its_floor_a_device_that_discharges_takes_no_new_work(
    conditions: DeviceConditions, spares_itself: bool
) -> None:
    assert bool(exhaustion_reason(conditions, 0.2)) is spares_itself
    assert exhaustion_reason(conditions, 0.0) == ""


def test_the_reason_names_the_charge_and_the_key() -> None:
    assert (
        exhaustion_reason(DeviceConditions(battery=0.12), 0.2)
        == "its battery is at 12% and discharging, below min_battery 20%"
    )


def test_degrees_and_single_percents_are_no_news_and_the_rest_is() -> None:
    before = DeviceConditions(battery=0.58, temperature_c=50.0)
    assert urgent_conditions(before) == urgent_conditions(DeviceConditions(battery=0.51, temperature_c=60.0))
    for after in (
        DeviceConditions(battery=0.49, temperature_c=50.0),
        DeviceConditions(battery=0.58, charging=True),
        DeviceConditions(battery=0.58, throttled=True),
        DeviceConditions(battery=0.58, metered=True),
        DeviceConditions(battery=0.58, held_up_s=0.4),
        UNTOLD,
    ):
        assert urgent_conditions(after) != urgent_conditions(before)


def test_conditions_in_words_say_what_is_out_of_the_ordinary() -> None:
    assert UNTOLD.in_words() == ""
    assert DeviceConditions(battery=0.5, charging=True).in_words() == "battery at 50%, charging"
    words = DeviceConditions(battery=0.5, temperature_c=91.0, throttled=True, metered=True).in_words()
    assert words == "battery at 50%; throttled at 91 °C; metered link"
    assert DeviceConditions(throttled=True).in_words() == "throttled"
    assert DeviceConditions(held_up_s=1.24).in_words() == "event loop held up for 1.2 s of the last minute"


NAMES = ["type", "scope", "status", "online", "capacity", "energy_now", "energy_full", "temp", "cur_state"]
FOLDERS = st.lists(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=24)), max_size=4)


@pytest.mark.slow
@given(FOLDERS, FOLDERS, FOLDERS)
def test_whatever_the_files_hold_the_conditions_are_in_range(
    supplies: list[Attributes], zones: list[Attributes], coolers: list[Attributes]
) -> None:
    found = conditions_of([one | {"type": "Battery"} for one in supplies], zones, coolers, metered=True)
    assert found.battery is None or 0.0 <= found.battery <= 1.0
    assert found.temperature_c is None or -100.0 < found.temperature_c < 200.0
    assert found.metered
