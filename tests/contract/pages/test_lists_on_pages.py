"""Closed lists on pages are complete: a table has every word that the code can say, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import msgspec
import pytest

from edge_agent.core.dial_policy import DialOut
from gateway.core.admission.admission import Reason as AdmissionReason
from gateway.core.fleet.link_health import Health
from gateway.core.health.degradation import NAMES as CONDITIONS
from gateway.core.history import trace_format
from simulator.scenarios.scenario import Scenario
from tests.contract.pages.text import pages, prose, read, rows
from tests.contract.surface.record import recorded
from tests.lint.tree import ROOT, sources
from tidegate.caller import RIGHTS
from tidegate.fleet.conditions import Mode
from tidegate.models.manifest import BatchingPolicy, EngineName, Unsure
from tidegate.netsim.links.stream import StreamProfile
from tidegate.netsim.proxy.link import Kind as PartitionKind
from tidegate.outcome import ERRORS
from tidegate.tools.build import trust_cli

CODE = re.compile(r"`([^`]+)`")


def names_of(structure: type[Any]) -> set[str]:
    if is_dataclass(structure):
        return {field.name for field in fields(structure)}
    return {field.encode_name for field in msgspec.structs.fields(structure)}


def first_cells(page: str, *head: str) -> list[str]:
    """The first cell of each row below this head, as far as the head is told."""
    return [cells[0] for found, cells, _ in rows(page) if found[: len(head)] == head]


def codes(cells: Iterable[str]) -> set[str]:
    return {code for cell in cells for code in CODE.findall(cell)}


@pytest.mark.parametrize(
    ("page", "head", "known"),
    [
        ("docs/headers.md", ("`code`",), {error.code for error in ERRORS}),
        ("docs/headers.md", ("reason", "means"), {*get_args(AdmissionReason), "quarantined"}),
        (
            "docs/degradation.md",
            ("condition",),
            {*CONDITIONS, "name_conflict", "configuration_drift", "device_file_refused", "version_unknown"},
        ),
        ("docs/models.md", ("engine",), set(get_args(EngineName))),
        ("docs/models.md", ("policy",), set(get_args(BatchingPolicy))),
        ("docs/offline.md", ("`unsure`",), set(get_args(Unsure))),
        ("docs/offline.md", ("mode",), set(get_args(Mode))),
        ("docs/edge-device.md", ("`dial_out`",), set(get_args(DialOut))),
        ("docs/simulator.md", ("key", "what it says"), names_of(Scenario)),
        ("docs/testing-with-links.md", ("kind",), {*get_args(PartitionKind), "from"}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_table_has_every_word_that_the_code_has_and_no_other(
    page: str, head: tuple[str, ...], known: set[str]
) -> None:
    told = codes(first_cells(page, *head))
    assert told, f"{page} has no table that begins with {head}"
    assert told == known


def test_the_keys_of_a_link_are_all_told() -> None:
    cells = first_cells("docs/testing-with-links.md", "key", "")
    told = {word.partition(":")[0].strip() for code in codes(cells) for word in re.sub(r"\{.*\}", "", code).split(",")}
    assert told == names_of(StreamProfile)


def test_the_reasons_of_a_route_are_words_that_the_code_has() -> None:
    words = {line.partition(" / ")[2] for line in recorded("literals")}
    told = codes(first_cells("docs/headers.md", "reason", "the target was"))
    assert len(told) > 12
    assert told <= words


def test_the_rights_of_a_credential_are_all_told() -> None:
    (row,) = (cells for head, cells, _ in rows("docs/security.md") if head[0] == "grant" and cells[0] == "rights")
    assert tuple(CODE.findall(row[2])) == RIGHTS


@pytest.mark.slow
def test_every_audit_line_of_a_command_is_told() -> None:
    """Each kind that the code writes: the words of `audit_log.note` and of what calls it."""
    noted = {
        found.value
        for source in sources()
        if source.is_product and re.search("audit_log|record_in_trail", source.text)  # to parse all takes seconds
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and _notes(node.func)
        for one in node.args
        for found in ast.walk(one)
        if isinstance(found, ast.Constant) and isinstance(found.value, str)
    } | set(trust_cli._ACTIONS.values())  # noqa: SLF001  # they stand nowhere else
    table = [cells for head, cells, _ in rows("docs/security.md") if head[:3] == ("command", "file", "`audit`")]
    assert len(noted) > 8
    assert codes(cells[2] for cells in table) == noted


def _notes(function: ast.expr) -> bool:
    """Whether it is `audit_log.note` or `record_in_trail`."""
    match function:
        case ast.Attribute(ast.Name("audit_log"), "note") | ast.Name("record_in_trail"):
            return True
    return False


def test_the_states_of_a_link_have_the_numbers_and_the_words_of_the_code() -> None:
    (row,) = (cells for _, cells, _ in rows("docs/observability.md") if cells[0] == "`tidegate_link_state`")
    assert set(re.findall(r"\d (\w+)", row[3])) == set(get_args(Health))
    console = " ".join(first_cells("docs/console.md", "link"))
    assert all(word in console for word in ("well", "slow", "silent", "in doubt", "down"))


@pytest.mark.parametrize(
    ("member", "structures"),
    [
        ("header.jsonl", (trace_format.RecordedHeader,)),
        ("targets.jsonl", (trace_format.RecordedTarget, trace_format.RecordedModel, trace_format.RecordedVariant)),
        ("requests.jsonl", (trace_format.RecordedRequest, trace_format.RecordedAttempt)),
        ("links.jsonl", (trace_format.RecordedLink,)),
        ("end.jsonl", (trace_format.RecordedEnd,)),
    ],
)
def test_the_members_of_a_recording_are_told_field_by_field(member: str, structures: tuple[type[Any], ...]) -> None:
    (row,) = (cells for _, cells, _ in rows("docs/recording.md") if cells[0] == f"`{member}`")
    assert set(CODE.findall(row[1])) - {trace_format.FORMAT} == {name for one in structures for name in names_of(one)}


def test_the_fixtures_of_the_plugin_are_all_told() -> None:
    known = {found[1] for line in recorded("pytest_plugin") if (found := re.match(r"fixture (\w+) /", line))}
    told = {
        re.match(r"\w+", code)[0]
        for cell in first_cells("docs/testing-with-links.md", "fixture")
        for code in CODE.findall(cell)
    }  # type: ignore[index]
    assert told == known


def test_the_profiles_that_pages_name_come_with_the_product() -> None:
    """`--link pool=lte_driving`, `--scenario lte_driving`, `simulate office_wifi`."""
    shipped = {line.rpartition(" / ")[2] for line in recorded("words") if line.startswith(("link profile", "scenario"))}
    text = "\n".join(read(page) for page in pages())
    before = r"(?:--scenario|--link [\w/-]+=|simulate|play\()[ \"]?"
    named = set(re.findall(before + r"([a-z0-9]+_[a-z0-9_]+)(?![\w.])", text))  # a file's name has a suffix
    assert len(named) > 2
    assert named <= shipped


def test_every_page_is_reached_from_another_one() -> None:
    linked = {
        name for page in ("README.md", "docs/ARCHITECTURE.md") for name in re.findall(r"docs/([\w-]+\.md)", read(page))
    }
    linked |= {
        name for one in linked for line in prose(f"docs/{one}") for name in re.findall(r"\(([\w-]+\.md)", line.text)
    }
    own = {page.removeprefix("docs/") for page in pages() if re.fullmatch(r"docs/[\w-]+\.md", page)}
    assert own - {"ARCHITECTURE.md", "GLOSSARY.md"} <= linked


def test_the_glossary_is_short_in_order_and_names_rooms_that_exist() -> None:
    lines = [line for line in read("docs/GLOSSARY.md").splitlines() if line.startswith("- ")]
    terms = [re.match(r"- \*\*([^*]+)\*\* - .+; `", line) for line in lines]
    assert all(terms), [line for line, term in zip(lines, terms, strict=True) if term is None]
    names = [term[1].lower() for term in terms if term]
    assert names == sorted(set(names))
    assert len(names) <= 80
    rooms = {room for line in lines for room in re.findall(r"`([\w/.]+)`", line.partition("** - ")[2]) if "/" in room}
    assert [room for room in sorted(rooms) if not (ROOT / room).exists()] == []
