"""The terminal's view of a rollout; ending the view leaves the rollout alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console, RenderableType

from tests.support.models.tiny_models import tiny_repository
from tidegate import clock
from tidegate.admin_client import Admin, AdminError
from tidegate.fleet.reported import ModelReport, Reported, RolloutState
from tidegate.models.repository import Repository
from tidegate.rollout.plan import MAX_CHUNK_BYTES
from tidegate.tools.build.cli import model
from tidegate.tools.delivery import follow
from tidegate.tools.delivery.configure import configuration
from tidegate.tools.delivery.files import LEAST_CHUNK_BYTES, MOST_CHUNKS, chunk_for
from tidegate.tools.delivery.order import ListedDevice
from tidegate.tools.delivery.plan import plan_of, version_files
from tidegate.tools.delivery.rows import device_rows
from tidegate.tools.delivery.screen import MOST_ROWS, devices_view, rollout_view


def part(step: str, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "wave": 0,
        "reason": "",
        "state": "",
        "running": "1",
        "done_bytes": 0,
        "total_bytes": 0,
        **more,
    }


def rollout(phase: str = "running", **devices: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "digits-2-a", "model": "digits", "version": "2", "phase": phase, "reason": "", "wave": 1,
        "sizes": [1, 3], "counts": {"working": len(devices)}, "elapsed_s": 12.0, "devices": devices, "notes": [],
    }  # fmt: skip


def printed(one: dict[str, Any]) -> str:
    return on_paper(rollout_view(one))


def on_paper(view: RenderableType) -> str:
    screen = Console(file=io.StringIO(), width=140)
    screen.print(view)
    return screen.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_screen_shows_how_far_each_device_is_and_why_not_further_the_failed_first() -> None:
    loading = part("working", state="downloading", done_bytes=5_000_000, total_bytes=20_000_000)
    failed = part("failed", state="rolled_back", reason="probe_accuracy: [/] off by 0.3")
    shown = printed(rollout(a=loading, b=failed, c=part("waiting")))

    assert "25% of 20.0 MB" in shown and "probe_accuracy: [/] off by 0.3" in shown
    lines = [line.split()[0] for line in shown.splitlines()[3:6]]
    assert lines == ["b", "a", "c"]


def test_a_thousand_devices_do_not_fill_the_screen() -> None:
    shown = printed(rollout(**{f"edge-{number}": part("waiting") for number in range(1000)}))

    assert f"… and {1000 - MOST_ROWS} more" in shown and len(shown.splitlines()) < MOST_ROWS + 8


def test_ctrl_c_prints_that_the_rollout_goes_on_and_how_to_come_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(clock, "block_until", leave)
    with pytest.raises(SystemExit) as left:
        follow.follow(Admin("http://127.0.0.1:1"), rollout(), as_json=False)

    said = capsys.readouterr().err
    assert left.value.code == 130
    assert "goes on without you" in said and "tidegate model status digits-2-a --watch" in said


@pytest.mark.parametrize(("phase", "code"), [("succeeded", None), ("returned", 1), ("paused", 1)])
def test_the_exit_code_says_how_it_ended(phase: str, code: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        follow.follow(Admin("http://127.0.0.1:1"), rollout(phase), as_json=True)
        ended = None
    except SystemExit as left:
        ended = left.code

    assert ended == code and '"phase": "' + phase in capsys.readouterr().out


def test_a_gateway_that_is_away_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [AdminError("no gateway answers"), rollout("succeeded")]

    def read(_self: Admin, _path: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, AdminError):
            raise answer
        return answer

    monkeypatch.setattr(clock, "block_until", lambda _: None)
    monkeypatch.setattr(Admin, "read", read)
    follow.follow(Admin("http://127.0.0.1:1"), rollout(), as_json=False)

    assert answers == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--waves", "5%,50%"], "they must grow from above 0 to 100%"),
        (["--waves", "all"], "percentages, as in 5%,25%,100%"),
        (["--deadline", "soon"], "no duration"),
        (["--success", "0"], "not in the range"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_before_anything_is_sent(words: list[str], said: str) -> None:
    done = CliRunner().invoke(model, ["rollout", "digits", "--key", "k", "--admin", "http://127.0.0.1:1", *words])

    assert done.exit_code == 2 and said in done.output


def test_a_version_that_all_devices_have_is_nothing_to_do_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, chain = Repository(tiny_repository(tmp_path / "models")), tmp_path / "roots.json"
    chain.write_text("[]")
    content = plan_of(version_files(repository, "double", "1")[1], "1").content
    has_it = Reported("k1", 1, 1, 0, models=(ModelReport("double", RolloutState.COMMITTED, "1", content),))
    report = {"urls": [], "devices": json.loads(msgspec.json.encode([ListedDevice("k1", "fresh", 1, reported=has_it)]))}
    monkeypatch.setattr(Admin, "read", lambda *_: report)
    command = ["rollout", "double", "--key", str(tmp_path / "k.key"), "--repository", str(repository.root)]
    done = CliRunner().invoke(model, command)
    assert (done.exit_code, done.output) == (0, "all 1 devices have double 1 already: there is nothing to do\n")
    order = CliRunner().invoke(model, [*command, "--out", str(tmp_path / "order")])
    assert order.exit_code == 0 and order.output.endswith("and no order is written\n")
    as_json = CliRunner().invoke(model, [*command, "--json"])
    assert json.loads(as_json.output) == {"id": None, "model": "double", "version": "1"} and as_json.exit_code == 0
    for options in (["--roots", str(chain)], ["--rotate"]):
        new_keys = CliRunner().invoke(model, [*command, *options])
        assert new_keys.exit_code == 1 and "keys change with what is new for a device only" in new_keys.output
    report["devices"] = []
    nobody = CliRunner().invoke(model, command)
    assert nobody.exit_code == 1 and "no device that takes rollouts" in nobody.output


def settings_rollout(group: str, number: int) -> dict[str, Any]:
    return {**rollout(), "id": f"configuration-{group}-{number:x}", "kind": "configuration", "model": "configuration"}


def test_rollouts_of_settings_are_listed_and_found_by_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [rollout(), *(settings_rollout(group, number) for number, group in enumerate(("all", "kiosks", "all"), 16))]
    devices = json.loads(msgspec.json.encode([ListedDevice("k1", "fresh", 1)]))
    answers = {"/v1/rollouts": {"rollouts": every}, "/v1/devices": {"urls": [], "devices": devices}}
    monkeypatch.setattr(Admin, "read", lambda _, path: answers[path])
    gateway = Admin("http://127.0.0.1:1")

    assert follow.newest(gateway, "all") == "configuration-all-12"
    assert follow.newest(gateway, "kiosks") == "configuration-kiosks-11"
    with pytest.raises(click.ClickException, match="`tidegate fleet configuration` those of settings"):
        follow.newest(gateway, "kiosk")
    listed = CliRunner().invoke(configuration, [])
    assert all(one["id"] in listed.output for one in every[1:]) and "digits-2-a" not in listed.output
    as_json = json.loads(CliRunner().invoke(configuration, ["--json"]).output)
    assert [one["id"] for one in as_json["rollouts"]] == [one["id"] for one in every[1:]]


def test_a_group_without_a_device_is_told_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = Repository(tiny_repository(tmp_path / "models"))
    device = ListedDevice("k1", "fresh", 1, reported=Reported("k1", 1, 1, 0, groups=("kiosks",)))
    report = {"urls": [], "devices": json.loads(msgspec.json.encode([device]))}
    monkeypatch.setattr(Admin, "read", lambda *_: report)
    words = ["--key", str(tmp_path / "k.key"), "--repository", str(repository.root), "--group", "zzz"]
    done = CliRunner().invoke(model, ["rollout", "double", *words])
    assert done.exit_code == 1 and "no device is in the group 'zzz'; there are: kiosks" in done.output


@pytest.mark.parametrize("words", [["abort", "digits"], ["rollback", "digits"]])
def test_a_gateway_that_ships_nothing_differs_from_one_without_such_a_rollout(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_self: Admin, _path: str) -> Any:
        raise AdminError("404: Not Found", 404)

    monkeypatch.setattr(Admin, "read", nothing)
    done = CliRunner().invoke(model, words)

    assert done.exit_code == 1 and "no section `artifacts`" in done.output


@pytest.mark.parametrize(("name", "status"), [("digits", 0), ("digits-2-a", 0), ("", 0), ("digist", 1)])
def test_a_name_that_no_model_and_no_rollout_has_is_an_error_and_no_empty_table(
    name: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = {"version": "2", "edges": 1, "soaking": 0, "pools": 1, "share": None, "quality": {}}
    told: dict[str, dict[str, Any]] = {
        "/v1/rollouts": {"rollouts": [rollout()]},
        "/v1/rollouts/digits-2-a": rollout(),
        "/v1/devices": {"devices": []},
        "/v1/versions": {"models": [{"name": "digits", "meant": "2", "trial": None, "versions": [version]}]},
    }
    monkeypatch.setattr(Admin, "read", lambda _self, path: told[path])
    done = CliRunner().invoke(model, ["status", name])

    assert done.exit_code == status, done.output
    assert ("no model and no rollout is called 'digist'" in done.output) == bool(status)


@pytest.mark.parametrize("size", [0, 1, LEAST_CHUNK_BYTES * MOST_CHUNKS, 10**8, 10**9, 8 * 10**9])
def test_a_files_chunks_are_few_enough_for_every_devices_document(size: int) -> None:
    chunk = chunk_for(size)

    assert -(-size // chunk) <= MOST_CHUNKS and LEAST_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES


@pytest.mark.slow
def test_the_devices_of_a_large_fleet_are_a_screenful_those_with_a_reason_first_and_all_where_asked() -> None:
    told = {"model": "digits", "running": "1", "wanted": "2", "reported_revision": 1, "desired_revision": 2}
    rows = [{"device": f"kiosk-{n:04}", "state": "ready", "reason": "", **told} for n in range(1000)]
    rows[900] |= {"state": "downloading"}
    rows[950] |= {"state": "rolled_back", "reason": "golden cases differ"}

    short, long = (on_paper(devices_view(rows, whole=whole)).splitlines() for whole in (False, True))

    devices = [line for line in short if "kiosk-" in line]
    assert ["kiosk-0950" in devices[0], "kiosk-0900" in devices[1], len(devices)] == [True, True, MOST_ROWS]
    assert short[-1].startswith(f"… and {1000 - MOST_ROWS} more, {1000 - MOST_ROWS} ready (--all")
    assert len([line for line in long if "kiosk-" in line]) == 1000 and "more" not in long[-1]


def test_a_device_that_is_not_heard_of_any_more_does_not_look_ready() -> None:
    offers = [{"name": "digits", "version": "1", "state": "ready"}]
    devices = [
        {"name": name, "freshness": freshness, "reported": reported, "offers": offers}
        for name, freshness, reported in (
            ("a", "dead", None),
            ("b", "fresh", None),
            ("c", "dead", {"models": [{"model": "digits", "state": "failed", "reason": "probe_slow"}]}),
        )
    ]
    rows = device_rows(devices, [], set())
    assert [row["reason"] for row in rows] == ["not heard of any more: this is its last word", "", "probe_slow"]
    shown = on_paper(devices_view(rows))
    assert shown.index("probe_slow") < shown.index("last word"), "what failed comes first"
