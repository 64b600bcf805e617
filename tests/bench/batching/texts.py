"""What is asked: rows of real text in the model's tokens, of mixed length, and when each of them comes.

Rows are cut from one stream of real English between the model's own first and last token. Two mixes:

    mixed   log-normal lengths, median 18 tokens, sigma 0.9, within 4 and 256: many short, few long
    split   nine in ten of 6 to 16 tokens, one in ten of 256

A schedule is drawn at rate 1 and then compressed, so the same seed is the same pattern at each rate, for whoever is
measured; what one rate meets the next one meets too, only closer together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import exp
from pathlib import Path
from random import Random
from typing import Final

ROWS: Final = 1024
LONG: Final = 256
MEDIAN: Final = 18
SIGMA: Final = 0.9
SHORTEST: Final = 4
MIXES: Final = ("mixed", "split")
_SEED: Final = 7

Row = list[int]


@dataclass(frozen=True, slots=True)
class Due:
    """One request of an open loop: seconds after the beginning, and which row."""

    at: float
    row: int


def schedule(seed: int, rate: float, seconds: float) -> list[Due]:
    """Poisson arrivals over so many seconds."""
    draw = Random(seed)
    due, at = list[Due](), 0.0
    while (at := at + draw.expovariate(1.0)) < rate * seconds:
        due.append(Due(at / rate, draw.randrange(ROWS)))
    return due


def lengths(mix: str) -> list[int]:
    draw = Random(_SEED)
    if mix == "split":
        return [LONG if draw.random() < 0.1 else draw.randint(6, 16) for _ in range(ROWS)]
    return [min(LONG, max(SHORTEST, round(MEDIAN * exp(SIGMA * draw.gauss(0.0, 1.0))))) for _ in range(ROWS)]


def write_rows(tokenizer: Path, into: Path) -> None:
    """Tokenise, cut and keep the rows of every mix."""
    from tokenizers import Tokenizer

    from tidegate.tools.build.demo.corpus import texts

    made = Tokenizer.from_file(str(tokenizer))
    made.no_truncation()
    first, *_, last = made.encode("a").ids
    stream = list(made.encode(" ".join(texts(900)), add_special_tokens=False).ids)
    found: dict[str, list[Row]] = {}
    for mix in MIXES:
        at, found[mix] = 0, []
        for length in lengths(mix):
            inside = [stream[(at + place) % len(stream)] for place in range(length - 2)]
            found[mix].append([first, *inside, last])
            at += length
    into.write_text(json.dumps(found))


def read_rows(path: Path) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = json.loads(path.read_text())
    return found
