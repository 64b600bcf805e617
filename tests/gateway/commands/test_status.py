"""`tidegate status` in words: what workers' sandboxes lack, the gateways beside this one, targets that are down."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from gateway.commands.status import configuration_lines, gateway_lines, models_table, sandbox_lines, targets_table


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


def test_a_name_that_two_gateways_have_is_said_though_no_other_is_seen() -> None:
    alone: dict[str, Any] = {"count": 1, "others": []}
    assert gateway_lines(alone) == []
    (line,) = gateway_lines({**alone, "has_namesake": True})
    assert "another one has this one's name" in line and "change `name`" in line


def test_a_long_reason_leaves_room_for_the_name_of_its_target() -> None:
    down = {
        "state": "down",
        "reason": "it does not accept this gateway's key (401): " + "its operator has to set it " * 3,
    }
    rest = {"address": "http://h:1", "transport": "openai", "models": [], "rtt_ms": 1.0, "queued": 0, "in_flight": 0}
    told = Console(width=150)
    with told.capture() as caught:
        told.print(targets_table([{"id": "edge/desk", **down, **rest}]))
    assert "edge/desk" in caught.get() and "http://h:1" in caught.get()


def test_addresses_and_reasons_in_brackets_are_shown_as_they_are() -> None:
    down = {"state": "down", "reason": "leaving: [/x] cannot connect to [fe80::1]:9001"}
    rest = {"address": "[fd00::5]:8001", "transport": "link", "models": [], "rtt_ms": 1.0, "queued": 0, "in_flight": 0}
    told = Console(width=150)
    with told.capture() as caught:
        told.print(targets_table([{"id": "edge/desk", **down, **rest}]))
    for shown in ("[fd00::5]:8001", "[/x]", "[fe80::1]:9001"):
        assert shown in caught.get()


def test_names_that_look_like_markup_end_no_table() -> None:
    rest = {
        "state": "ready",
        "reason": "",
        "address": "a:1",
        "transport": "link",
        "rtt_ms": 1.0,
        "queued": 0,
        "in_flight": 0,
    }
    model = {"name": "m[/x]", "variants": ["a[/b]", "\x1b[2J"], "paced": False}
    told = Console(width=200)
    with told.capture() as caught:
        told.print(targets_table([{"id": "edge/[/d]", "models": [model], **rest}]))
        told.print(models_table([{"name": "m[/x]", "version": "[/v]", "ready": True, "targets": ["edge/[/d]"]}]))
    assert "m[/x] a[/b]" in caught.get() and "\x1b" not in caught.get()


def test_settings_of_devices_are_counted_where_some_are_desired() -> None:
    assert configuration_lines({}) == configuration_lines({"devices": {}, "drifted": []}) == []
    (line,) = configuration_lines({"devices": {"in_sync": 38, "pending": 0, "drifted": 2}})
    assert line.startswith("settings of devices: 38 in sync, 2 drifted")
