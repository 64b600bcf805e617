"""Each link of a page leads to a file, folder or heading that is there, and the index leads to every page of `docs/`.

A heading's anchor is GitHub's, which the site of `make docs` follows: lower case, without marks, blanks as hyphens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from posixpath import dirname, normpath

import pytest

from tests.contract.pages.text import CHANGELOG, pages, prose, resolve

INDEX = "docs/index.md"
LINK = re.compile(r"\]\(([^)\s]*)\)|(?:href|src|srcset)=\"([^\"]*)\"")
HEADING = re.compile(r"#{1,6} +(.*?)(?: +#+)?$")


def links(page: str) -> Iterator[tuple[str, str]]:
    """Each link with its line and what a reader follows; those to other places than this repository are left out."""
    for line in prose(page):
        for found in LINK.finditer(re.sub(r"`[^`]*`", "", line.text)):
            link = found[1] or found[2] or ""
            if not re.match(r"[a-z]+:", link):
                yield line.place, link


def problem(page: str, link: str) -> str:
    """Why it leads nowhere; "" if it leads somewhere."""
    path, _, anchor = link.partition("#")
    if path.startswith("/"):
        return "begins at the root of a server"
    target = normpath(f"{dirname(page)}/{path}".lstrip("/")) if path else page
    if target.startswith("..") or not resolve(target).exists():
        return f"{target} is not there"
    if anchor and anchor not in anchors(target):
        return f"{target} has no heading #{anchor}"
    return "" if path or anchor else "is empty"


@cache
def anchors(page: str) -> frozenset[str]:
    if not page.endswith(".md"):
        return frozenset()
    seen: Counter[str] = Counter()
    found = set()
    for line in prose(page):
        if heading := HEADING.match(line.text):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->", "", heading[1]))
            name = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return frozenset(found)


@pytest.mark.slow
def test_every_link_leads_somewhere() -> None:
    found = [(page, place, link) for page in [*pages(), CHANGELOG] for place, link in links(page)]
    wrong = [f"{place}: {link}: {why}" for page, place, link in found if (why := problem(page, link))]
    assert not wrong, "\n".join(wrong)
    assert len(found) > 200
    assert sum("#" in link for _, _, link in found) > 40


def test_the_index_leads_to_every_page() -> None:
    """To those of a folder by way of the folder."""
    linked = {normpath(f"docs/{link.partition('#')[0]}") for _, link in links(INDEX)}
    missing = [
        page
        for page in pages()
        if page.startswith("docs/") and page != INDEX and page not in linked and dirname(page) not in linked
    ]
    assert missing == [], f"{INDEX} does not link them"


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("pool.md", ""),
        ("../deploy/prometheus", ""),
        ("models.md#models-that-generate-text", ""),
        ("#guides", ""),
        ("#guide", "docs/index.md has no heading #guide"),
        ("models.md#models-that-sing", "docs/models.md has no heading"),
        ("deploy/prometheus", "docs/deploy/prometheus is not there"),
        ("../../elsewhere.md", "is not there"),
        ("/docs/pool.md", "begins at the root"),
        ("", "is empty"),
    ],
)
def test_what_is_wrong_with_a_link_is_found(link: str, why: str) -> None:
    assert problem(INDEX, link) == "" if not why else why in problem(INDEX, link)
