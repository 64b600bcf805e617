"""The README, and the pages of the pool and of the Python client: what they show with MiniLM is typed and answered.

What needs the language model is done by tests that are about it, and one page here has nothing that a machine without a
registry, a cluster or another maker's server could run: a table says so, command by command.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.guides.page import Page
from tests.e2e.guides.reader import NEEDS_A_NETWORK, Reader
from tests.e2e.stack import WARM_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    NEEDS_A_NETWORK,
]
INSTALLS = "installs from a registry"
RELEASES = "packs for minutes: tests/tidegate/tools/release has its parts"
MACHINES: dict[str, dict[str, str]] = {
    "docs/ray.md": {
        "pip install": INSTALLS,
        "ray start": "tests/e2e/ray_serve/test_ray_serve.py starts a Ray where one is installed",
        "serve deploy": "tests/e2e/ray_serve/test_ray_serve.py deploys the same file",
        "export RAY_gcs_rpc_server": "of a cluster's nodes",
        "RAY_REDIS_ADDRESS=redis:6379 ray start": "of a cluster's head, under a supervisor",
        "tidegate status": "asks what `serve deploy` serves",
        "tidegate ray-scale": "tests/e2e/ray_serve/test_ray_serve.py, and tests/tidegate/tools/test_ray_scale_cli.py",
    },
    "docs/releasing.md": {
        "make dist": RELEASES,
        "tidegate keys signing create operator": RELEASES,
        "tidegate release sign": RELEASES,
        "tidegate release verify": RELEASES,
        "pip install": INSTALLS,
        "PIP_EXTRA_INDEX_URL": INSTALLS,
    },
    "docs/upstreams.md": {
        "llama-server": "another maker's: tests/e2e/generate/test_real_upstream.py runs one where it is installed",
        "tidegate status": "asks the gateway before that server",
    },
}
WITHOUT_COMMANDS = (
    "docs/sites.md",
    "docs/operations.md",
    "docs/runbook.md",
    "docs/scale.md",
    "docs/console.md",
    "docs/headers.md",
)


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
    own = "a reader's own model: the tutorial and the guide to models are followed"
    generates = "asks a real language model: tests/e2e/generate"
    left_out = {
        "make run": "sets up an environment; what it starts is `tidegate up`",
        "from openai import OpenAI": generates,
        "curl -N http://127.0.0.1:8000/v1/chat/completions": generates,
        "tidegate model quantize encoder.onnx": own,
        "tidegate model add encoder": own,
        "tidegate model rollout encoder": "the guide to rollouts is followed",
        "tidegate model status encoder": "the guide to rollouts is followed",
    }
    with (
        Page("README.md", left_out=left_out) as readme,
        Page("docs/python-client.md", left_out={"pip install": INSTALLS}) as client,
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
    with Page("docs/pool.md", left_out={"pip install": INSTALLS}) as page:
        reader.run(page.take("tidegate model build minilm"))
        terminal = reader.terminal()
        try:
            pool = terminal.begin(page.take("TIDEGATE_POOL_MODEL_REPOSITORY=models tidegate pool"))
            reader.until(lambda: "Ask it with any client" in pool.printed, "tidegate pool")
            assert "serves 1 model on" in pool.printed
        finally:
            terminal.close()


@pytest.mark.parametrize("page", [*MACHINES, *WITHOUT_COMMANDS])
def test_each_other_command_is_left_out_with_its_reason(page: str) -> None:
    with Page(page, left_out=MACHINES.get(page, {})):
        pass
