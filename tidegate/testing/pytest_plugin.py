"""The pytest plugin: simulated links as fixtures. `pip install tidegate[testing]`; guide: docs/testing-with-links.md.

    link            link(upstream, "lte_driving") → a link; clients connect to its `address`
    netsim          links on a timeline: netsim.at(5.0, link.partition), netsim.every(2.0, link.flap, 0.4)
    trace           trace("NAME"): a recording, or a skipped test where this machine has none
    tidegate_stack  tidegate_stack(links={"pool": "lte_driving"}) → a whole running gateway, pool, edges and broker

What happened on the links goes into the report of a test that fails. A link that lost or invented a byte by its own
fault fails the test that used it, whatever else the test found.

This file is imported in every run of pytest where Tidegate is installed, so it imports nothing but pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tidegate.testing.links import LinkThread, SimLink
    from tidegate.testing.netsim import Netsim
    from tidegate.testing.stack import Stack

LOGS = pytest.StashKey[list[tuple[str, Callable[[], str]]]]()
_LINES_IN_REPORT = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tidegate", "simulated links (tidegate)")
    group.addoption("--link-seed", type=int, default=1, help="Seed of simulated links' chance. Default: 1.")
    parser.addini("link_traces", "Folders with recordings of links, for the fixture `trace`.", type="paths", default=[])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for title, text in item.stash.get(LOGS, []):
            report.sections.append((title, text()))
    return report


@pytest.fixture
def _link_thread(request: pytest.FixtureRequest) -> Iterator[LinkThread]:
    from tidegate.testing.links import LinkThread

    thread = LinkThread(request.config.getoption("--link-seed"))
    _in_report(request.node, "simulated links", lambda: thread.log.text(newest=_LINES_IN_REPORT))
    yield thread
    thread.close()
    if thread.violations:
        pytest.fail("\n".join(["simulated links lost or invented bytes:", *map(str, thread.violations)]), pytrace=False)


@pytest.fixture
def link(_link_thread: LinkThread) -> Callable[..., SimLink]:
    """Make a link: `link("127.0.0.1:8001", "lte_driving")`, or `link(8001, delay_ms=40, to_mbit=2)`."""
    return _link_thread.link


@pytest.fixture
def netsim(_link_thread: LinkThread) -> Iterator[Netsim]:
    """Links on a timeline that begins now: `netsim.at(5.0, link.partition)`."""
    from tidegate.testing.netsim import Netsim

    one = Netsim(_link_thread)
    yield one
    one.close()
    if one.errors:
        raise one.errors[0]


@pytest.fixture
def trace(pytestconfig: pytest.Config) -> Any:
    """Find recorded capacity for a link: `link(8001, traces=(trace("train.up"), trace("train.down")))`.

    The files are looked for in the folders of `TIDEGATE_TRACES` and of the ini option `link_traces`; a test is skipped
    where this machine has no such recording. `trace.constant(2.0)` and `trace.steps([(0.0, 2.0), (1.0, 0.2)])`, in
    Mbit/s, are there on every machine. Guide: docs/testing-with-links.md, "Recorded links".
    """
    from tidegate.testing.traces import TraceFinder, TraceMissing, folders

    class OrSkip(TraceFinder):
        def __call__(self, name: str) -> Any:
            try:
                return super().__call__(name)
            except TraceMissing as error:
                pytest.skip(str(error))

    return OrSkip(folders(*map(str, pytestconfig.getini("link_traces"))))


@pytest.fixture(scope="session")
def _stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    """Running stacks by their options; all are stopped at the end of the session."""
    from tidegate.testing.stack import Stack

    running: dict[Any, Stack] = {}

    def get(links: dict[str, str], edges: int, models: Path | None, seed: int) -> Stack:
        key = (tuple(sorted(links.items())), edges, models, seed)
        if key in running and not running[key].is_whole():  # a test has killed a part of it
            running.pop(key).stop()
        if key not in running:
            folder = tmp_path_factory.mktemp("tidegate")
            running[key] = Stack(folder, links=links, edges=edges, models=models, seed=seed)
            try:
                running[key].wait_ready()
            except Exception:
                del running[key]
                raise
        return running[key]

    yield get
    for one in running.values():
        one.stop()


@pytest.fixture
def tidegate_stack(request: pytest.FixtureRequest, _stacks: Callable[..., Stack]) -> Callable[..., Stack]:
    """Start a whole Tidegate, or reuse one that was started with the same options, with its links as they were then."""
    seed = request.config.getoption("--link-seed")

    def start(links: dict[str, str] | None = None, *, edges: int = 2, models: Path | None = None) -> Stack:
        stack = _stacks(links or {}, edges, models, seed)
        stack.mend()
        _in_report(request.node, "simulated links of the stack", stack.log)
        return stack

    return start


def _in_report(item: pytest.Item, title: str, text: Callable[[], str]) -> None:
    item.stash.setdefault(LOGS, []).append((title, text))
