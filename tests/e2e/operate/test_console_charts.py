"""The console's charts in a real headless Chromium with given data: gaps, lone points, many points, the cursor."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from tests.support.gateway.app import configured
from tests.support.observe.browser import MISSING, PROGRAM, Page, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
    pytest.mark.timeout(120),
]
AT = 1_700_000_000  # a whole minute and twenty seconds: UTC seconds
TICKS: list[tuple[str, float, float, int, list[float]]] = [
    ("linear", 0, 220, 5, [0, 50, 100, 150, 200]),
    ("linear", 0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ("logarithmic", 2, 1200, 4, [10, 100, 1000]),
    ("logarithmic", 1.6, 36, 5, [2, 5, 10, 20]),
    ("logarithmic", 0.1, 1e7, 4, [0.1, 100, 100_000]),
    ("logarithmic", 2.1, 3.4, 5, [2.5, 3]),
    ("time", AT, AT + 300, 5, [AT + 40 + 60 * minute for minute in range(5)]),
    ("time", AT, AT + 20, 4, [AT + 5 * step for step in range(5)]),
]
CHART = """import('/console/charts/time_series.js').then(({ TimeSeries }) => {
  const box = document.createElement('div');
  box.id = 'tried';
  box.style.setProperty('width', '600px');
  document.querySelector('main').prepend(box);
  const series = [{ label: 'one', colour: '--one', fill: true }, { label: 'two', colour: '--two', dash: '6 3' }];
  globalThis.tried = new TimeSeries(box, series, { titledBy: 'chart-requests-title' });
})"""
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
VALUES = "[...document.querySelectorAll('#tried .chart-legend .value')].map(node => node.textContent)"


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    """A page with a chart of two lines in the box `#tried`, and nothing in it."""
    async with Gateway(configured(tmp_path)) as gateway, chromium() as browser, browser.page() as page:
        await page.goto(gateway.addresses["admin"] + "/")
        await page.until("document.body.dataset.stream === 'live'")
        await page.value(CHART)
        yield page
        assert page.errors == []


async def show(page: Page, *columns: list[Any]) -> None:
    await page.value(f"tried.show({json.dumps(columns)})")
    await page.value(DRAWN)


async def segments(page: Page, values: list[float | None], step: float = 1.0) -> list[list[list[float]]]:
    """What is drawn of values that lie `step` pixels apart."""
    found: list[list[list[float]]] = await page.value(
        "import('/console/charts/line.js').then(({ segments }) => "
        f"segments({json.dumps(values)}, place => place * {step}, value => value))"
    )
    return found


async def test_a_missing_value_is_a_gap_and_a_value_between_two_gaps_is_a_dot(page: Page) -> None:
    await show(page, [AT + second for second in range(7)], [1, 2, None, 3, None, 4, 5], [None] * 7)

    line, dots, area = [
        await page.value(f"document.querySelector('#tried path.{name}').getAttribute('d')")
        for name in ("line", "dots", "area")
    ]

    assert (line.count("M"), line.count("L")) == (2, 2)
    assert dots.count("M") == 1
    assert area.count("Z") == 2
    assert await page.value("document.querySelectorAll('#tried path.line')[1].getAttribute('d')") == ""
    assert await page.value(VALUES) == ["5.0", "–"]


async def test_a_chart_without_data_says_so_and_one_point_is_seen(page: Page) -> None:
    await page.value(DRAWN)
    empty = "document.querySelector('#tried .empty').getAttribute('visibility')"
    assert await page.value(empty) == "visible"
    assert await page.value("document.querySelectorAll('#tried .times text').length") == 0

    await show(page, [AT], [7], [0])
    assert await page.value(empty) == "hidden"
    assert await page.value("document.querySelector('#tried path.dots').getAttribute('d')") != ""
    assert await page.value(VALUES) == ["7.0", "0.0"]

    await show(page, [], [], [])
    assert await page.value(empty) == "visible"
    assert await page.value(VALUES) == ["–", "–"]


async def test_thousands_of_points_make_four_a_pixel_at_most_and_no_peak_is_lost(page: Page) -> None:
    values: list[float | None] = [float(place % 7) for place in range(20_000)]
    values[777], values[12_345] = 1000.0, -1000.0

    [segment] = await segments(page, values, step=0.01)

    assert len(segment) <= 4 * 200
    assert {1000.0, -1000.0} <= {y for _, y in segment}
    assert [x for x, _ in segment] == sorted(x for x, _ in segment)
    assert segment[0] == [0.0, values[0]]
    assert segment[-1] == pytest.approx([199.99, values[-1]])
    assert await segments(page, [1.0, None, 2.0, 3.0]) == [[[0.0, 1.0]], [[2.0, 2.0], [3.0, 3.0]]]

    await show(page, [AT + place / 100 for place in range(20_000)], values, values)
    assert await page.value("document.querySelector('#tried path.line').getAttribute('d').length") < 4 * 600 * 16


async def test_updates_keep_the_nodes_and_only_the_last_five_minutes_are_drawn(page: Page) -> None:
    nodes = "document.querySelectorAll('#tried *').length"
    counts = []
    for last in (300, 600, 900):
        times = [AT + second for second in range(last)]
        await show(page, times, [second % 50 for second in range(last)], [1] * last)
        counts.append(await page.value(nodes))
        points = await page.value("document.querySelector('#tried path.line').getAttribute('d').split('L').length")
        assert points <= 301
    for second in range(100):
        await show(page, [AT + second], [second], [None])
    await show(page, [AT + second for second in range(900)], [second % 50 for second in range(900)], [1] * 900)

    counts.append(await page.value(nodes))

    assert len(set(counts[1:])) == 1


async def test_the_legend_shows_the_newest_values_and_under_a_cursor_those_there(page: Page) -> None:
    times, values = [AT + second for second in range(300)], list(range(300))
    await show(page, times, values, [None if value < 100 else 10 * value for value in values])
    assert await page.value(VALUES) == ["299", "2990"]
    assert await page.value("document.querySelector('#tried .when').textContent") == "now"

    left, top, right = await page.value(
        "(() => { const box = document.querySelector('#tried .grid').getBoundingClientRect(); "
        "return [box.left, box.top, box.right]; })()"
    )
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + (right - left) / 4, y=top + 30)
    await page.value(DRAWN)
    first, second = await page.value(VALUES)
    assert abs(int(first) - 75) <= 1
    assert second == "–"
    assert await page.value("document.querySelector('#tried .cursor').getAttribute('visibility')") == "visible"
    shown = "[...document.querySelectorAll('#tried circle')].map(node => node.getAttribute('visibility'))"
    assert await page.value(shown) == ["inherit", "hidden"]

    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    await page.value(DRAWN)
    assert await page.value(VALUES) == ["299", "2990"]
    assert await page.value("document.querySelector('#tried .cursor').getAttribute('visibility')") == "hidden"


async def test_arrow_keys_move_the_cursor_and_say_what_is_there(page: Page) -> None:
    times, values = [AT + second for second in range(30)], list(range(30))
    await show(page, times, values, values)
    await page.value("document.querySelector('#tried svg.plot').focus()")
    said = "document.querySelector('#tried svg.plot').getAttribute('aria-valuetext')"
    met = []
    for key, code in (("ArrowLeft", 37), ("ArrowLeft", 37), ("PageUp", 33), ("Home", 36), ("ArrowRight", 39)):
        await page.press(key, code)
        await page.value(DRAWN)
        met.append((await page.value(VALUES))[0])
        assert f"one {met[-1]}, two {met[-1]}" in await page.value(said)
    assert met == ["29", "28", "18", "0.0", "1.0"]

    # The key's cursor stays with its instant while time passes, and goes past the newest.
    await show(page, [*times, AT + 30], [*values, 30], [*values, 30])
    assert (await page.value(VALUES))[0] == "1.0"
    await page.press("End", 35)
    await page.value(DRAWN)
    assert (await page.value(VALUES))[0] == "30"
    assert await page.value("document.querySelector('#tried .when').textContent") == "now"
    labelled = "document.querySelector('#tried svg.plot').getAttribute('aria-labelledby')"
    assert await page.value(f"document.getElementById({labelled}).textContent") != ""


async def test_a_chart_follows_its_boxs_width(page: Page) -> None:
    await show(page, [AT, AT + 60], [1, 2], [3, 4])
    view = "document.querySelector('#tried svg.plot').getAttribute('viewBox').split(' ')[2]"
    assert await page.value(view) == "600"
    await page.value("document.querySelector('#tried').style.setProperty('width', '320px')")
    await page.until(f"{view} === '320'")


async def test_ticks_are_round(page: Page) -> None:
    for kind, low, high, most, ticks in TICKS:
        found = await page.value(
            "import('/console/charts/scale.js').then((scale) => "
            f"scale.{kind}Ticks({{ low: {low}, high: {high} }}, {most}))"
        )
        assert found == pytest.approx(ticks), (kind, low, high)
