"""No page is forgotten: one that shows commands is named by a test that follows it or by a table that says why not."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.contract.pages.text import pages
from tests.e2e.guides.commands import commands
from tests.e2e.guides.reader import ROOT

pytestmark = pytest.mark.slow
_NAMED: Final = re.compile(r'"((?:docs/)?[A-Za-z-]+\.md)"')
_NOT_FOLLOWED: Final = {
    "docs/benchmarks.md": "benches, which take hours",
    "docs/cli-reference.md": "generated from the commands; tests/contract/pages holds it against them",
    "docs/index.md": "shows the way to the others",
}


def test_every_page_with_commands_is_followed() -> None:
    named = {page for path in (ROOT / "tests/e2e").rglob("*.py") for page in _NAMED.findall(path.read_text())}
    guides = [page for page in pages() if re.fullmatch(r"README\.md|docs/[a-z-]+\.md", page)]
    shown = {page for page in guides if commands(page)}
    assert len(shown) > 30
    assert shown - named - set(_NOT_FOLLOWED) == set()
