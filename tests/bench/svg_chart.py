"""A chart of measured figures as an SVG: places from left to right, a curve or bars for each series, with spreads.

The same figures give the same bytes. Colours follow the reader's light or dark scheme, and series differ by dashes and
by the shape of their points as well. Screen readers get the title, and a description that holds every value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final, Literal

# Colours that differ also for readers who see few of them (Okabe and Ito, "Color Universal Design", 2008): on white,
# and lighter ones of the same hues on black.
_LIGHT: Final = ("#0072b2", "#c04f00", "#00805a", "#a8507f", "#8a6100", "#2b7fb8")
_DARK: Final = ("#56b4e9", "#ff8f4a", "#2fd0a0", "#e59ac4", "#e6b422", "#9ccff0")
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
_LEFT, _TOP, _WIDTH, _HEIGHT, _STEPS = 52, 54, 720, 260, 5
_UNDER = 18  # from the axis to the names of the places
_TURNED = 58  # room below for names that are turned


@dataclass(frozen=True)
class Point:
    """A figure at one place, with its lowest and highest. `note` is shown under the pointer."""

    place: str
    value: float
    low: float
    high: float
    note: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one name; a place without a point is a gap."""

    label: str
    points: Sequence[Point]


@dataclass(frozen=True)
class SvgChart:
    """What a chart shows. Values are drawn and told in `form`, one of Python's formats."""

    title: str
    series: Sequence[Series]
    places: Sequence[str]
    x: str = ""
    y: str = ""
    form: str = ".3g"
    kind: Literal["curves", "bars"] = "curves"
    least: float = 0.0
    most: float | None = None  # of the scale; None: as the figures need
    turned: bool = False  # names of places, where they are many or long
    notes: Sequence[str] = field(default=())  # lines at the foot, such as where it was measured

    def drawn(self) -> str:
        """Return the whole file."""
        top = self.most if self.most is not None else ceiling(max(self._highest(), default=1.0))
        foot = _TOP + _HEIGHT + _UNDER + (_TURNED if self.turned else 8) + (18 if self.x else 0)
        height = foot + 18 * (len(self.series) + len(self.notes)) + 10
        parts = [*self._scale(top), *self._names()]
        for number, series in enumerate(self.series):
            parts += self._bars(number, series, top) if self.kind == "bars" else self._curve(number, series, top)
            parts += self._legend(number, series.label, foot + 18 * number + 10)
        below = foot + 18 * len(self.series) + 10
        parts += [
            f'<text class="note" x="{_LEFT}" y="{below + 18 * number}">{escape(note)}</text>'
            for number, note in enumerate(self.notes)
        ]
        if not any(series.points for series in self.series):
            middle = f'x="{_LEFT + _WIDTH / 2:.0f}" y="{_TOP + _HEIGHT / 2:.0f}"'
            parts.append(f'<text {middle} text-anchor="middle">not measured yet</text>')
        return document(self.title, self._told(), _LEFT + _WIDTH + 20, height, parts, colours=len(self.series))

    def _told(self) -> str:
        """Every value in words, for those who do not see the picture."""
        told = []
        for series in self.series:
            values = ", ".join(f"{one.place}: {self._with_spread(one)}" for one in series.points)
            told.append(f"{series.label}: {values or 'not measured yet'}.")
        axes = [f"From left to right: {self.x}."] * bool(self.x) + [f"Upwards: {self.y}."] * bool(self.y)
        return " ".join([*axes, *told, *(f"{note}." for note in self.notes)])

    def _with_spread(self, one: Point) -> str:
        value, low, high = (f"{each:{self.form}}" for each in (one.value, one.low, one.high))
        return value if low == high else f"{value} ({low} to {high})"

    def _highest(self) -> Iterable[float]:
        return (one.high for series in self.series for one in series.points)

    def _x(self, place: str) -> float:
        return _LEFT + _WIDTH / max(len(self.places), 1) * (self.places.index(place) + 0.5)

    def _y(self, value: float, top: float) -> float:
        share = (value - self.least) / (top - self.least)
        return _TOP + _HEIGHT * (1.0 - min(max(share, 0.0), 1.0))

    def _scale(self, top: float) -> list[str]:
        parts = [f'<text class="title" x="{_LEFT - 40}" y="18">{escape(self.title)}</text>']
        if self.y:
            parts.append(f'<text class="note" x="{_LEFT - 40}" y="33">{escape(self.y)}</text>')
        for number in range(_STEPS + 1):
            value = self.least + (top - self.least) * number / _STEPS
            y = self._y(value, top)
            parts += [
                f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}"/>',
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:{self._scale_form}}</text>',
            ]
        return parts

    @property
    def _scale_form(self) -> str:
        return ".0%" if self.form.endswith("%") else ".3g"

    def _names(self) -> list[str]:
        y, parts = _TOP + _HEIGHT + _UNDER, []
        for place in self.places:
            x = self._x(place)
            how = f'transform="rotate(-40 {x:.1f} {y})" text-anchor="end" class="code"' if self.turned else ""
            parts.append(f'<text x="{x:.1f}" y="{y}" {how or _MIDDLE}>{escape(place)}</text>')
        if self.x:
            below = y + (_TURNED if self.turned else 18)
            parts.append(
                f'<text class="note" x="{_LEFT + _WIDTH / 2:.0f}" y="{below}" {_MIDDLE}>{escape(self.x)}</text>'
            )
        return parts

    def _curve(self, number: int, series: Series, top: float) -> list[str]:
        dash = f' stroke-dasharray="{_dash(number)}"' if _dash(number) else ""
        way = " ".join(f"{self._x(one.place):.1f},{self._y(one.value, top):.1f}" for one in series.points)
        parts = [f'<polyline class="{_class(number)} curve" points="{way}"{dash}/>']
        for one in series.points:
            x, y = self._x(one.place), self._y(one.value, top)
            parts += [self._stroke(number, one, x, top), self._marked(number, one, x, y)]
        return parts

    def _bars(self, number: int, series: Series, top: float) -> list[str]:
        room = 0.7 * _WIDTH / max(len(self.places), 1)
        width, parts = room / max(len(self.series), 1), []
        for one in series.points:
            left = self._x(one.place) - room / 2 + width * number
            y = self._y(one.value, top)
            box = f'x="{left + 2:.1f}" y="{y:.1f}" width="{width - 4:.1f}" height="{_TOP + _HEIGHT - y:.1f}"'
            parts += [
                f'<rect class="{_class(number)} fill" {box}><title>{escape(self._title(series, one))}</title></rect>',
                self._stroke(number, one, left + width / 2, top),
                f'<text x="{left + width / 2:.1f}" y="{y - 5:.1f}" {_MIDDLE}>{one.value:{self.form}}</text>',
            ]
        return parts

    def _stroke(self, number: int, one: Point, x: float, top: float) -> str:
        low, high = self._y(one.low, top), self._y(one.high, top)
        kind = "spread" if self.kind == "bars" else f"{_class(number)} curve"
        return f'<line class="{kind}" x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"/>'

    def _marked(self, number: int, one: Point, x: float, y: float) -> str:
        return _mark(number, x, y, escape(self._title(self.series[number], one)))

    def _title(self, series: Series, one: Point) -> str:
        return f"{one.note or f'{series.label}, {one.place}'}: {self._with_spread(one)}"

    def _legend(self, number: int, label: str, y: float) -> list[str]:
        parts = [f'<text x="{_LEFT + 38}" y="{y}">{escape(label)}</text>']
        if self.kind == "bars":
            return [f'<rect class="{_class(number)} fill" x="{_LEFT}" y="{y - 9}" width="28" height="10"/>', *parts]
        dash = f' stroke-dasharray="{_dash(number)}"' if _dash(number) else ""
        line = f'<line class="{_class(number)} curve" x1="{_LEFT}" y1="{y - 4}" x2="{_LEFT + 30}" y2="{y - 4}"{dash}/>'
        return [line, _mark(number, _LEFT + 15, y - 4, escape(label)), *parts]


_MIDDLE: Final = 'text-anchor="middle"'


def document(title: str, told: str, width: float, height: float, parts: Sequence[str], *, colours: int = 0) -> str:
    """Return an SVG with a title and a description for screen readers, legible in light and dark.

    Args:
        told: what the picture shows, in words.
        colours: how many series there are, drawn by the classes `one0`, `one1`, …
    """
    rules = [f".one{n}{{--c:{_LIGHT[n % len(_LIGHT)]}}}" for n in range(colours)]
    dark = [f".one{n}{{--c:{_DARK[n % len(_DARK)]}}}" for n in range(colours)]
    style = [
        ":root{--c:#777}text{fill:#222}.title{font-size:14px;font-weight:bold}.note{fill:#555}.code{font-family:monospace}"
        ".back{fill:#fff}.grid{stroke:#ddd}.spread{stroke:#222}.curve{stroke:var(--c);stroke-width:2;fill:none}"
        ".fill{fill:var(--c)}",
        *rules,
        "@media (prefers-color-scheme:dark){text{fill:#e4ebf0}.note{fill:#a8b6c2}.back{fill:#0e151a}"
        ".grid{stroke:#2a3843}.spread{stroke:#e4ebf0}",
        *dark,
        "}",
    ]
    names = 'role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="11"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {names}>',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(told)}</desc>',
            f"<style>{''.join(style)}</style>",
            '<rect class="back" width="100%" height="100%"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def ceiling(value: float) -> float:
    """Return the next round number, for the top of a scale."""
    if value <= 0.0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * times for times in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0) if unit * times >= value)


def _class(number: int) -> str:
    return f"one{number}"


def _dash(number: int) -> str:
    return _DASHES[number % len(_DASHES)]


def _mark(number: int, x: float, y: float, title: str) -> str:
    """Return a point: a disc, a square, a diamond or a triangle by the series."""
    shape = (
        f'<circle class="{_class(number)} fill" cx="{x:.1f}" cy="{y:.1f}" r="4">',
        f'<path class="{_class(number)} fill" d="M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z">',
        f'<path class="{_class(number)} fill" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z">',
        f'<path class="{_class(number)} fill" d="M{x:.1f} {y - 5:.1f}l5 8h-10z">',
    )[number % 4]
    return f"{shape}<title>{title}</title></{shape[1:].partition(' ')[0]}>"
