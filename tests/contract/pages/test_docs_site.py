"""`make docs` builds a site that works from a folder, without a network: drawings, search, links out of `docs/`.

Skipped where `.venv-docs` is not set up, which needs npm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.pages.text import blocks, resolve
from tests.support.observe.browser import MISSING, PROGRAM, chromium

MKDOCS = resolve(".venv-docs/bin/mkdocs")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not resolve(".venv-docs/.set-up").exists(), reason="needs .venv-docs: make docs"),
]


def build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MKDOCS, "build", "--strict", "-f", config, "-d", folder],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    built = build(resolve("mkdocs.yml"), folder)
    assert built.returncode == 0, built.stdout
    yield folder


def test_links_to_files_of_the_repository_lead_to_pages_of_the_site(site: Path) -> None:
    text = (site / "discovery.html").read_text()
    assert 'href="repository/deploy/kubernetes/gateway-rbac.yaml.html"' in text
    assert "kind: Role" in re.sub(
        r"<[^>]+>", "", (site / "repository/deploy/kubernetes/gateway-rbac.yaml.html").read_text()
    )
    assert 'href="../../SECURITY' not in (site / "security.html").read_text()


async def test_drawings_and_the_search_work_from_a_folder_without_a_server(site: Path) -> None:
    if PROGRAM is None:
        pytest.skip(MISSING)
    drawings = len(blocks("docs/ARCHITECTURE.md", "mermaid"))
    async with chromium() as browser, browser.page() as page:
        await page.goto(f"file://{site}/ARCHITECTURE.html")
        drawn = "[...document.querySelectorAll('div.mermaid')].filter(one => one.offsetHeight > 100).length"
        await page.until(f"{drawn} === {drawings}")
        await page.value("document.querySelector('[data-md-component=search-query]').focus()")
        await page.call("Input.insertText", text="jitter")
        await page.until("document.querySelectorAll('.md-search-result__item').length > 3")
        fetched = await page.value("performance.getEntriesByType('resource').map(one => one.name)")
        assert [one for one in fetched if one.startswith("http")] == []
        assert page.errors == []
        await page.screenshot(Path(".tidegate/screenshots/docs.png"), whole=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gone](pool.md#no-such-heading)", "no-such-heading"),
        ("[gone](no-such-page.md)", "no-such-page.md"),
        ("[gone](../deploy/no-such-file.yaml)", "no-such-file.yaml"),
    ],
)
def test_a_dead_link_fails_the_build(tmp_path: Path, text: str, said: str) -> None:
    shutil.copytree(resolve("docs"), tmp_path / "docs")
    shutil.copy(resolve("mkdocs.yml"), tmp_path)
    for one in ("deploy", ".venv-docs", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE"):
        (tmp_path / one).symlink_to(resolve(one))
    with (tmp_path / "docs/upstreams.md").open("a") as page:
        page.write(f"\n{text}\n")
    built = build(tmp_path / "mkdocs.yml", tmp_path / "out")
    assert built.returncode != 0
    assert said in built.stdout
