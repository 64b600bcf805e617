"""No command of a guide is forgotten: a test here follows its page, or what is not run is in the table with why."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.contract.pages.text import blocks, pages
from tests.e2e.guides.commands import Command, commands, left_out
from tests.e2e.guides.left_out import LEFT_OUT
from tests.e2e.guides.reader import ROOT

pytestmark = pytest.mark.slow


@cache
def followed() -> set[str]:
    """The pages that a test of this folder opens."""
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    opened = re.compile(r'(?:Guide\(\s*reader, |Page\()"((?:docs/)?[A-Za-z-]+\.md)"')
    return {page for source in sources for page in opened.findall(source)}


def test_each_page_of_the_table_is_followed_or_left_out_whole() -> None:
    whole = {page for page in LEFT_OUT if all(left_out(one, LEFT_OUT) for one in commands(page))}
    assert set(LEFT_OUT) - whole <= followed()
    assert len(whole | followed()) >= 33


def test_what_is_left_out_is_on_its_page() -> None:
    stale = [
        f"{page}: {begins}"
        for page, table in LEFT_OUT.items()
        for begins in table
        if not any(left_out(one, {page: {begins: "is there"}}) for one in commands(page))
    ]
    assert not stale, "left out, and not there"


def skipped() -> list[Command]:
    return [one for page in LEFT_OUT for one in commands(page) if left_out(one, LEFT_OUT)]


@pytest.mark.parametrize("command", skipped(), ids=lambda one: one.place)
def test_what_is_left_out_names_scripts_targets_and_files_that_exist(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", command.text):
        assert re.search(rf"(?m)^{target}:", makefile), f"no target {target}"
    made = ("deploy/compose/state/", "deploy/kustomize/rendered.yaml")
    for path in re.findall(r"(?<![\w/-])deploy/[\w./-]+", command.text):
        assert path.startswith(made) or re.match(r"deploy/tide-", path) or (ROOT / path).exists(), f"no file {path}"


@pytest.mark.parametrize("page", [page for page in pages() if re.fullmatch(r"README\.md|docs/[a-z-]+\.md", page)])
def test_commands_stand_in_blocks_that_say_so(page: str) -> None:
    typed = re.compile(r"(?m)^(?:\$ |(?:[A-Z_]+=\S* )*(?:tidegate|curl|pip|python3?|make|kubectl|docker|helm) )")
    assert [one.place for one in blocks(page, "", "text") if typed.search(one.text)] == []
