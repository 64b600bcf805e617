"""Guides in which a reader tries something with `tidegate up` are followed to the letter.

The pages' `tidegate up` serves what demo models there are; here it is told to leave the language model out, which takes
minutes to build, and the digits and the second device as well where the page asks them nothing.
"""

from __future__ import annotations

import pytest

from tests.e2e.guides.guide import Guide
from tests.e2e.guides.reader import NEEDS_A_NETWORK, Reader
from tests.support.stores import REDIS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(600),  # many programs start one after another, on a machine that may be busy
    pytest.mark.needs_mosquitto,
    NEEDS_A_NETWORK,
]
MINILM = {"tidegate up": "--demo minilm --edges 1"}


def test_devices_answers_are_compared_as_the_page_says(reader: Reader) -> None:
    with Guide(reader, "docs/agreement.md", with_options=MINILM) as guide:
        guide.until("for i in", r'"compared": [1-9]')
        guide.until("tidegate model disagreements", "disagreements are kept")


def test_a_device_asks_for_help_as_the_page_says(reader: Reader) -> None:
    with Guide(reader, "docs/asking-for-help.md") as guide:
        guide.until("python3", "tidegate-helped-by: gateway/gateway; because=unfit")
        guide.until("tidegate edge doctor", "ok +help: can be asked now: edge/near")
        guide.until("python3", "tidegate-helped-by: edge/near; because=no-model")


def test_a_known_answer_is_given_as_the_page_says(reader: Reader) -> None:
    with Guide(reader, "docs/known-answers.md", with_options=MINILM) as guide:
        guide.until("for i in 1 2", r"(?s)tidegate-served-by: (edge|pool)/.*tidegate-served-by: cache")
        guide.until("tidegate status", "known answers")
        guide.until("curl", 'outcome="hit"')


@pytest.mark.skipif(REDIS is None, reason="needs a Redis")
def test_gateways_share_as_the_page_says(reader: Reader) -> None:
    with Guide(reader, "docs/gateways.md") as guide:
        guide.until("tidegate status", "gateways: 2, quotas are shared with gateway-2")
        guide.until("tidegate status", "gateways: 2")
        guide.until("curl", "store_away")


def test_a_gateway_is_several_processes_as_the_page_says(reader: Reader) -> None:
    with Guide(reader, "docs/gateway-workers.md") as guide:
        guide.until("tidegate status", r"processes: keeper \(pid \d+\); worker-1 .*worker-2 ")


def test_a_model_is_cut_as_the_page_says(reader: Reader) -> None:
    with Guide(reader, "docs/layer-split.md", with_options=MINILM) as guide:
        guide.until("python3", r"\Asplit; .*\nhead=edge/")
