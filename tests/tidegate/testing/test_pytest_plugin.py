"""The plugin in somebody else's project: real runs of pytest in a folder of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_small_installs import BLOCKER

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


def run_pytest(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tidegate.testing.pytest_plugin",
        "-p",
        "no:randomly",
        "-q",
        *options,
    ]
    return subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def project(folder: Path, test: str, conftest: str = "") -> Path:
    (folder / "test_theirs.py").write_text(test)
    (folder / "conftest.py").write_text((ROOT / "docs/examples/conftest.py").read_text() + conftest)
    return folder


def test_the_guide_s_example_passes_as_it_stands(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs/examples", tmp_path / "theirs", ignore=shutil.ignore_patterns("__pycache__"))
    ran = run_pytest(tmp_path / "theirs")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout
    guide = (ROOT / "docs/testing-with-links.md").read_text()
    example = (ROOT / "docs/examples/test_payments.py").read_text()
    shown = guide.partition("```python\n")[2].partition("```")[0]
    assert shown in example  # what the guide shows is what was run


def test_a_link_that_stays_broken_to_the_end_of_a_test_holds_up_no_server_of_the_guide(tmp_path: Path) -> None:
    theirs = project(
        tmp_path,
        """
import socket

def test_silence_is_noticed(link, bank):
    silent = link(bank, delay_ms=1)
    with socket.create_connection((silent.host, silent.port), 5) as client:
        client.sendall(b"hello")
        while not silent.state()["bytes"]["to"]["delivered"]:
            pass
        silent.partition("blackhole")
""",
    )
    assert "1 passed" in run_pytest(theirs).stdout


def test_the_guide_s_example_of_recorded_links_passes_with_recordings_and_is_skipped_without(tmp_path: Path) -> None:
    guide = (ROOT / "docs/testing-with-links.md").read_text()
    shown = guide.partition("## Recorded links")[2].partition("```python\n")[2].partition("```")[0]
    client = (ROOT / "docs/examples/test_payments.py").read_text().partition("def test_")[0]
    theirs = project(tmp_path, client + shown)
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    for name in ("train.up", "train.down"):
        (recordings / name).write_text("".join(f"{ms}\n" for ms in range(1, 200, 4)))

    with_them = run_pytest(theirs, "-o", "link_traces=recordings")
    without = run_pytest(theirs, "-rs", TIDEGATE_TRACES="")

    assert "2 passed" in with_them.stdout, with_them.stdout
    assert "1 passed, 1 skipped" in without.stdout, without.stdout
    assert "there is no recording 'train.up' (looked in nowhere: set TIDEGATE_TRACES" in " ".join(
        without.stdout.split()
    )
    told = run_pytest(theirs, "--fixtures").stdout
    assert 'link(8001, traces=(trace("train.up"), trace("train.down")))' in told


def test_links_need_none_of_the_product_s_libraries(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs/examples", tmp_path / "theirs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    blocked = "aiohttp uvloop paho amqtt torch onnxruntime transformers prometheus_client tokenizers matplotlib scipy"
    ran = run_pytest(
        tmp_path / "theirs",
        "-p",
        "no:aiohttp",
        "-p",
        "no:kmock",
        PYTHONPATH=f"{tmp_path}:{ROOT}",
        BLOCKED_MODULES=blocked,
    )
    assert "3 passed" in ran.stdout, ran.stdout + ran.stderr


def test_a_failing_test_s_report_has_what_happened_on_the_link_and_its_seed(tmp_path: Path) -> None:
    theirs = project(
        tmp_path,
        """
def test_fails(link, bank):
    one = link(bank, "nat_60s", seed=11, name="uplink")
    one.partition("blackhole", "from")
    assert False
""",
    )
    ran = run_pytest(theirs)
    assert ran.returncode == 1
    assert "simulated links" in ran.stdout
    assert "uplink  scenario  name=nat_60s seed=11" in ran.stdout
    assert "uplink  partition  kind=blackhole direction=from" in ran.stdout


def test_a_recording_that_is_nowhere_skips_with_the_reason_and_one_that_is_there_is_used(tmp_path: Path) -> None:
    theirs = project(
        tmp_path,
        """
def test_recorded(trace, link, bank):
    one = link(bank, traces=(trace("mine.up"), trace.constant(2.0)))
    assert one.state()["layers"]["base"]["profile"]["recording"]["offset_s"] == 0.0
    assert trace.steps([(0, 1.2), (1, 0), (2, 0)]).period_s == 2
""",
    )
    assert "there is no recording 'mine.up'" in run_pytest(theirs, "-rs").stdout
    (tmp_path / "mine.up").write_text("100\n200\n")
    assert "1 passed" in run_pytest(theirs, TIDEGATE_TRACES=str(tmp_path)).stdout
    assert "1 passed" in run_pytest(theirs, "-o", f"link_traces={tmp_path}").stdout


def test_a_byte_that_the_link_lost_by_itself_fails_the_test_that_used_it(tmp_path: Path) -> None:
    theirs = project(
        tmp_path,
        """
import socket
from tidegate.netsim.proxy.ledger import ByteLedger

def test_loses(link, bank, monkeypatch):
    monkeypatch.setattr(ByteLedger, "give", lambda self, piece: None)
    with socket.create_connection(link(bank).address.split(":")) as server:
        server.sendall(b"balance?\\n")
        assert server.recv(100) == b"42\\n"
""",
    )
    ran = run_pytest(theirs)
    assert "simulated links lost or invented bytes" in ran.stdout
    assert ran.returncode == 1


def test_what_a_timeline_raises_fails_the_test(tmp_path: Path) -> None:
    theirs = project(
        tmp_path,
        """
import threading

def test_raises(netsim, bank):
    done = threading.Event()
    def boom():
        done.set()
        raise RuntimeError("boom on the timeline")
    netsim.at(0.0, boom)
    assert done.wait(10)

def test_every(netsim, bank):
    uplink = netsim.link(bank)
    seen = []
    done = threading.Event()
    def act(word):
        seen.append(word)
        if len(seen) == 3:
            done.set()
    netsim.every(0.01, act, "x", start_s=0.0, times=3)
    assert done.wait(10)
    netsim.partition()
    assert uplink.state()["partition"] == "blackhole"
    netsim.heal()
    assert uplink.state()["partition"] is None
    uplink.hang_up()
    uplink.toxic("slow", "to", delay_ms=3)
    uplink.remove("slow")
    uplink.clear()
    assert uplink.state()["layers"] == {}
    assert seen == ["x"] * 3
""",
    )
    ran = run_pytest(theirs)
    assert "boom on the timeline" in ran.stdout
    assert "2 passed, 1 error" in ran.stdout, ran.stdout


def test_an_act_that_calls_pytest_fail_fails_the_test_and_ends_no_timeline(tmp_path: Path) -> None:
    theirs = project(
        tmp_path,
        """
import threading

import pytest


def test_fails_in_an_act(netsim):
    went_on = threading.Event()
    netsim.at(0.0, pytest.fail, "the alarm did not come")
    netsim.at(0.02, went_on.set)
    assert went_on.wait(10)


@pytest.mark.parametrize("never", [float("nan"), float("inf")])
def test_a_second_that_never_comes_is_refused_and_ends_no_timeline(netsim, never):
    went_on = threading.Event()
    with pytest.raises(ValueError, match="at_s must be below"):
        netsim.at(never, went_on.set)
    netsim.at(0.0, went_on.set)
    assert went_on.wait(10)
""",
    )
    ran = run_pytest(theirs)
    assert ran.returncode == 1
    assert "3 passed, 1 error" in ran.stdout and "Failed: the alarm did not come" in ran.stdout, ran.stdout


def test_an_asynchronous_test_may_use_it_too_and_bad_words_name_themselves(tmp_path: Path) -> None:
    theirs = project(
        tmp_path,
        """
import asyncio, pytest

async def ask(address):
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"balance?\\n")
    answer = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return answer

def test_async(link, bank):
    assert asyncio.run(ask(link(bank, delay_ms=2).address)) == b"42\\n"

def test_words(link, bank):
    with pytest.raises(Exception, match="no link scenario 'lte_diving'"):
        link(bank, "lte_diving")
    with pytest.raises(Exception, match="'delay': there is no such key"):
        link(bank, delay=3)
    with pytest.raises(Exception, match="is no upstream"):
        link("nowhere")
""",
    )
    assert "2 passed" in run_pytest(theirs).stdout


def test_unused_it_imports_nothing_but_pytest() -> None:
    program = "import sys, pytest; before = set(sys.modules); import tidegate.testing.pytest_plugin; "
    program += "import json; print(json.dumps(sorted(set(sys.modules) - before - {'json'})))"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert json.loads(ran.stdout) == ["tidegate", "tidegate.testing", "tidegate.testing.pytest_plugin"]
