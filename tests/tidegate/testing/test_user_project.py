"""A user's project that has packages called `gateway` and `simulator`, in an environment where Tidegate is installed.

The environment is a fresh one without pip and without a network: Tidegate's packages and its metadata are in
`site-packages`, as a wheel would put them there, and a `.pth` file adds the libraries of the running environment.
The plugin is therefore found by its entry point, and our own `gateway` and `simulator` are importable beside theirs.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import tidegate

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
pytestmark = pytest.mark.slow

TESTS = """
import socket
import threading
from pathlib import Path

import tidegate

import gateway.config
import simulator.world

HERE = Path(__file__).parents[1]


def fetch(address):
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 10) as server:
        server.sendall(b"balance?\\n")
        return server.recv(100)


def test_their_own_packages_are_the_ones_imported():
    assert Path(gateway.config.__file__) == HERE / "gateway/config.py"
    assert Path(simulator.world.__file__) == HERE / "simulator/world.py"
    assert (gateway.config.NAME, simulator.world.NAME) == ("their gateway", "their simulator")
    assert not Path(tidegate.__file__).is_relative_to(HERE)


def test_links_traces_and_timelines_work(link, netsim, trace, bank):
    slow = link(bank, traces=(trace.constant(2.0), trace.constant(2.0)), delay_ms=2)
    assert fetch(slow.address) == b"42\\n"
    broken = netsim.link(bank, "lte_driving")
    netsim.at(0.0, broken.partition, "refuse")
    netsim.at(0.1, broken.heal)
    healed = threading.Event()
    netsim.at(0.1, healed.set)
    assert healed.wait(10)
    assert fetch(broken.address) == b"42\\n"


def test_the_public_names_work():
    from tidegate.testing import LinkThread, SimLink, TraceFinder

    assert {LinkThread.__module__, SimLink.__module__} == {"tidegate.testing.links"}
    assert TraceFinder([]).constant(1.0).period_s == 10.0
"""
STACK_TESTS = """
def test_a_whole_stack_runs_our_own_processes(tidegate_stack):
    stack = tidegate_stack(links={"pool": "good_wifi"}, edges=1)
    status, _ = stack.infer(units=8, budget_ms=20_000)
    assert status == 200
    assert {"gateway", "pool", "edge-1"} <= set(stack.pids)
"""
SHARED_STACK_TESTS = """
import os
import signal

import pytest

ROUNDS = []


@pytest.fixture
def stack(tidegate_stack):
    return tidegate_stack(links={"pool": "good_wifi"}, edges=1)


def test_leaves_its_links_and_a_process_as_no_other_test_would_want_them(stack):
    ROUNDS.append(stack)
    stack.links["pool"].play("flap_fast")
    stack.links["pool"].apply(delay_ms=900)
    stack.links["pool"].toxic("slow", "to", delay_ms=900)
    os.kill(stack.pids["edge-1"], signal.SIGSTOP)


def test_finds_them_as_they_were_and_kills_a_process(stack):
    assert stack is ROUNDS[0]
    state = stack.links["pool"].state()
    assert (state["scenario"], list(state["layers"])) == ("good_wifi", ["base"])
    assert state["layers"]["base"]["profile"]["delay_ms"] == 2.0
    with open(f"/proc/{stack.pids['edge-1']}/stat") as told:
        assert told.read().rpartition(")")[2].split()[0] != "T"
    os.kill(stack.pids["edge-1"], signal.SIGKILL)


def test_finds_another_stack_that_is_whole(stack):
    assert stack is not ROUNDS[0] and stack.is_whole() and not ROUNDS[0].is_whole()
    assert stack.infer(units=8, budget_ms=20_000)[0] == 200
"""


def entry_points_text() -> str:
    """`entry_points.txt` as a wheel built from pyproject.toml has it."""
    project = PROJECT["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment in which Tidegate is installed."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False, symlinks=True)
    place = next(environment.glob("lib/python*/site-packages"))
    for package in OURS:
        (place / package).symlink_to(ROOT / package, target_is_directory=True)
    metadata = place / f"tidegate-{tidegate.__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tidegate\nVersion: {tidegate.__version__}\n")
    (metadata / "entry_points.txt").write_text(entry_points_text())
    # A plain path line: the `.pth` files of that folder, such as an editable installation's, are not read.
    (place / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin/python"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    for package, module in (("gateway", "config"), ("simulator", "world")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / f"{module}.py").write_text(f'NAME = "their {package}"\n')
        (tmp_path / package / "__main__.py").write_text(f'raise SystemExit("this is their {package}")\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text((ROOT / "docs/examples/conftest.py").read_text())
    (tmp_path / "tests/test_theirs.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(python: Path, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(
        [str(python), *words], cwd=folder, env=inherited | environment,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def run_pytest(python: Path, folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(python, folder, "-m", "pytest", "-q", "-p", "no:randomly", *options, **environment)


def test_the_environment_is_as_a_wheel_leaves_it(python: Path, theirs: Path) -> None:
    program = "import gateway, tidegate; print(gateway.__file__); print(tidegate.__file__)"
    place = next(python.parents[1].glob("lib/python*/site-packages"))
    ours = run(python, theirs, "-P", "-c", program).stdout.split()
    assert ours == [str(place / "gateway/__init__.py"), str(place / "tidegate/__init__.py")]
    plain = run(python, theirs, "-c", program).stdout.split()
    assert plain == [str(theirs / "gateway/__init__.py"), str(place / "tidegate/__init__.py")]


def test_with_the_plugin_active_their_packages_are_imported_and_the_fixtures_work(python: Path, theirs: Path) -> None:
    ran = run_pytest(python, theirs)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout


def test_pytest_as_a_program_imports_their_packages_too(python: Path, theirs: Path) -> None:
    (theirs / "conftest.py").write_text("")  # its folder goes first on the path: rootdir of a project without src/
    ran = run(python, theirs, "-P", "-m", "pytest", "-q", "-p", "no:randomly")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout


@pytest.mark.e2e
@pytest.mark.parametrize("environment", [{}, {"PYTHONPATH": "."}], ids=["plain", "their-folder-on-PYTHONPATH"])
def test_a_stack_runs_our_processes_beside_their_packages(
    python: Path, theirs: Path, environment: dict[str, str]
) -> None:
    (theirs / "tests/test_stack.py").write_text(STACK_TESTS)
    ran = run_pytest(python, theirs, **environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 passed" in ran.stdout


@pytest.mark.e2e
def test_a_stack_that_tests_share_is_as_at_first_for_each_of_them(python: Path, theirs: Path) -> None:
    (theirs / "tests/test_theirs.py").write_text(SHARED_STACK_TESTS)
    ran = run_pytest(python, theirs)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout
