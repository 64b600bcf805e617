"""The epoch store keeps the session number on disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from edge_agent.fleet import epoch as epoch_file
from edge_agent.fleet.epoch import EpochStore
from tidegate.fleet.messages import MAX_EPOCH

NOW = 1.8e9  # a sane clock
IN_1970 = 12.0


def test_each_session_gets_a_greater_epoch_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "epoch"
    store = EpochStore(path)
    assert store.current == 0
    first, second = store.bump(NOW), store.bump(NOW)
    assert (first, second, store.current) == (1_800_000_000, 1_800_000_001, 1_800_000_001)
    assert EpochStore(path).bump(NOW - 1e6) == 1_800_000_002


@pytest.mark.parametrize("utc_s", [IN_1970, -5.0, 1e12])
def test_a_clock_that_cannot_be_right_is_not_believed(tmp_path: Path, utc_s: float) -> None:
    store = EpochStore(tmp_path / "epoch")
    assert [store.bump(utc_s), store.bump(utc_s)] == [1, 2]


def test_a_wiped_disk_still_moves_forward_by_the_clock(tmp_path: Path) -> None:
    path = tmp_path / "epoch"
    before = EpochStore(path).bump(NOW)
    path.unlink()
    assert EpochStore(path).bump(NOW + 60) > before


def test_a_gateways_hint_is_the_least_that_is_used(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "epoch")
    assert store.bump(IN_1970, at_least=500) == 500
    assert store.bump(IN_1970, at_least=500) == 501


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe\x00", b"-5", b"9" * 400, b"9007199254740992"])
def test_a_damaged_file_is_said_and_the_clock_takes_over(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "epoch"
    path.write_bytes(content)
    store = EpochStore(path)
    with capture_logs() as logs:
        assert store.current == 0
    assert [(one["log_level"], one["path"]) for one in logs] == [("warning", str(path))]
    with capture_logs():
        assert store.bump(NOW) == 1_800_000_000
    assert path.read_text() == "1800000000\n"


def test_what_another_process_of_this_device_used_meanwhile_is_not_used_again(tmp_path: Path) -> None:
    zombie, successor = EpochStore(tmp_path / "epoch"), EpochStore(tmp_path / "epoch")
    assert [zombie.bump(IN_1970), successor.bump(IN_1970), successor.bump(IN_1970), zombie.bump(IN_1970)] == [
        1,
        2,
        3,
        4,
    ]


def test_the_greatest_epoch_is_not_exceeded(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "epoch")
    assert store.bump(NOW, at_least=MAX_EPOCH) == MAX_EPOCH
    assert store.bump(NOW) == MAX_EPOCH


def test_an_epoch_that_cannot_be_kept_is_not_used(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "epoch")
    store.bump(NOW)
    store.path = tmp_path / "epoch" / "below-a-file"
    with pytest.raises(OSError):
        store.bump(NOW)
    assert store.current == 1_800_000_000
    assert "1800000000" in repr(store)
    assert "unread" in repr(EpochStore(tmp_path / "other"))


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_the_epoch_grows_in_memory_and_is_saved_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EpochStore(tmp_path / "epoch")
    store.bump(NOW)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(epoch_file, "write_atomically", full)
        assert [store.bump(NOW), store.bump(NOW)] == [1_800_000_001, 1_800_000_002]
        assert not store.save()
        # The next start reads an older number, and its clock makes up for it.
        assert EpochStore(tmp_path / "epoch").bump(NOW + 60) > store.current
    assert [one["log_level"] for one in logs if one["event"].endswith("memory only")] == ["warning", "warning"]
    assert store.unsaved == "No space left on device"
    assert "unsaved: No space" in repr(store)
    assert store.save()
    assert (store.unsaved, store.path.read_text()) == ("", "1800000002\n")


def test_without_clock_and_disk_two_starts_hardly_use_one_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EpochStore(tmp_path / "epoch").bump(IN_1970)
    monkeypatch.setattr(epoch_file, "write_atomically", full)
    starts = [EpochStore(tmp_path / "epoch", draw=lambda at=at: at).bump(IN_1970) for at in (0.25, 0.75)]  # type: ignore[misc]
    assert starts == [2 + (1 << 14), 2 + 3 * (1 << 14)]
