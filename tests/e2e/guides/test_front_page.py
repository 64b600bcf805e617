"""The README, and the pages of the pool and of the Python client: what they show with MiniLM is typed and answered.

What needs the language model is done by tests that are about it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.guides.guide import Page
from tests.e2e.guides.reader import NEEDS_A_NETWORK, Reader
from tests.e2e.stack import WARM_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    NEEDS_A_NETWORK,
]


@pytest.fixture
def reader(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """In a folder with MiniLM, built already."""
    monkeypatch.setenv("TIDEGATE_POOL_WARMUP_BUDGET_S", WARM_S)
    made = Reader(tmp_path)
    try:
        for folder in (tmp_path / "models", tmp_path / ".tidegate" / "models"):
            shutil.copytree(models / "minilm", folder / "minilm")
            shutil.copy(models / "trusted.digests", folder)
        yield made
    finally:
        made.close()


def test_the_readme_and_the_page_of_the_client_go_as_they_say(reader: Reader) -> None:
    with (
        Page("README.md") as readme,
        Page("docs/python-client.md") as client,
    ):
        terminal = reader.terminal()
        try:
            up = terminal.begin(readme.take("tidegate up", {"--edges 1": "--demo minilm --edges 1"}))
            reader.until(lambda: "requests, as they are served" in up.printed, "tidegate up")
            answered = reader.run(readme.take("curl -i http://127.0.0.1:8000/v1/embeddings"))
            for header in ("tidegate-served-by", "tidegate-route", "tidegate-budget-left-ms", "server-timing"):
                assert header in answered.lower()
            assert '"embedding"' in answered
            (reader.folder / "client.py").write_text(client.take("from tidegate import Tidegate"))
            assert re.search(r"\(1, 384\) (edge/edge-1|pool/pool) \w+", reader.run("python client.py"))
            assert "127.0.0.1:8009" in up.printed
            reader.run("""curl -sSf -X PUT 127.0.0.1:8009/partition -d '{"kind": "blackhole", "for_s": 5}'""")
        finally:
            terminal.close()


def test_the_page_of_the_pool_goes_as_it_says(reader: Reader) -> None:
    with Page("docs/pool.md") as page:
        reader.run(page.take("tidegate model build minilm"))
        terminal = reader.terminal()
        try:
            pool = terminal.begin(page.take("TIDEGATE_POOL_MODEL_REPOSITORY=models tidegate pool"))
            reader.until(lambda: "Ask it with any client" in pool.printed, "tidegate pool")
            assert "serves 1 model on" in pool.printed
        finally:
            terminal.close()
