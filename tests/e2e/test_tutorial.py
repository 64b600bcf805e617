"""The tutorial `docs/tutorial.md` is followed to the letter, in a folder and a network of its own.

What the page says in words (stop the pool, start it again) is done between its sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.guides.reader import NEEDS_A_NETWORK, Reader, sections

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.needs_mosquitto,
    NEEDS_A_NETWORK,
]


STEPS = {heading: steps for heading, steps in sections("docs/tutorial.md", "sh", "python", "terminal").items() if steps}


def served(told: str) -> tuple[dict[str, int], float]:
    """What `ask.py` printed: answers by their reason and target, and how many of a hundred are right."""
    right = re.search(r"([\d.]+) % right", told)
    assert right is not None, told
    return {who: int(count) for count, who in re.findall(r"(\d+) answers from (.+)", told)}, float(right[1])


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_the_tutorial_goes_as_it_says(reader: Reader) -> None:
    done = ["Two models", "Add them as one", "Configure four processes", "Start them", "Ask", "The pool goes"]
    done.append("The devices go")
    assert list(STEPS) == done, "a section is not followed here"

    (trained,) = reader.follow(STEPS["Two models"])
    assert len(re.findall(r"wide: 9\d\.\d% of 540 unseen digits", trained)) == 2

    added, calibrated = reader.follow(STEPS["Add them as one"])
    assert "quality  top-1" in added
    assert "pool: top1 0.9" in added
    assert "held out" in calibrated

    reader.follow(STEPS["Configure four processes"])
    reader.follow(STEPS["Start them"])
    everywhere = "edge/edge-1, edge/edge-2, pool/cloud"  # offer the model
    reader.until_status(everywhere)

    answers, explained, by_curl = reader.follow(STEPS["Ask"])
    by, right = served(answers)
    assert sum(by.values()) == 200
    assert by["pool/cloud (escalated)"] > 5
    assert sum(count for who, count in by.items() if who.startswith("edge/")) > 100
    assert right > 95
    assert "reader 1 x 64" in explained
    assert "200 OK" in by_curl
    assert "tidegate-served-by: edge/" in by_curl.lower()

    reader.stop("tidegate pool")
    (answers,) = reader.follow(STEPS["The pool goes"])
    by, right = served(answers)
    assert sum(by.values()) == 200
    assert all(who.startswith("edge/") for who in by)
    assert right > 90

    reader.start(next(step.text for step in STEPS["Start them"] if step.text.startswith("tidegate pool")))
    reader.until_status(everywhere)
    reader.stop("edge-1.yaml")
    reader.stop("edge-2.yaml")
    (answers,) = reader.follow(STEPS["The devices go"])
    by, right = served(answers)
    assert sum(by.values()) == 200
    assert all(who.startswith("pool/cloud") for who in by)
    assert right > 95
    for part in ("gateway", "tidegate pool"):
        reader.stop(part)
