"""`tidegate status` says which targets' workers have the network or the disk, and why."""

from __future__ import annotations

from typing import Any

from gateway.commands.status import sandbox_lines


def target(id: str, *sandboxes: str | None) -> dict[str, Any]:
    return {"id": id, "models": [{"name": "m", "sandbox": one} for one in sandboxes]}


def test_what_sandboxes_lack_is_a_line_each_with_the_targets_and_the_reason() -> None:
    targets = [
        target("edge/a", "files: Landlock [none]", "files: Landlock [none]"),
        target("edge/b", "files: Landlock [none]"),
        target("edge/c", "", ""),
        target("pool/p", "the key `sandbox` is off", ""),
        target("pool/old", None),
        {"id": "pool/foreign", "models": [{"name": "m"}]},
    ]
    assert sandbox_lines(targets, named=1) == [
        "[yellow]workers not sandboxed in full[/] on edge/a and 1 more: files: Landlock \\[none]",
        "[yellow]workers not sandboxed in full[/] on pool/p: the key `sandbox` is off",
        "workers without network and disk on 1 of 6 targets; 2 do not say",
    ]


def test_where_all_sandboxes_are_whole_one_line_says_so_and_where_nothing_is_known_none_does() -> None:
    assert sandbox_lines([target("edge/a", ""), target("edge/b", "")]) == [
        "workers without network and disk on 2 of 2 targets"
    ]
    assert sandbox_lines([target("pool/old", None), target("edge/x")]) == []
