"""A version appears whole or not at all."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.tools.build.staging import model_lock, staged_version


def write(root: Path, content: str) -> None:
    with model_lock(root, "m"), staged_version(root, "m", "1") as folder:
        (folder / "artefact").write_text(content)


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "m").iterdir() if path.name != ".lock")


def test_a_build_that_ends_well_is_in_its_place(tmp_path: Path) -> None:
    write(tmp_path, "one")
    assert visible(tmp_path) == ["1"]
    assert (tmp_path / "m" / "1" / "artefact").read_text() == "one"


def test_nothing_is_in_its_place_while_it_is_built(tmp_path: Path) -> None:
    with model_lock(tmp_path, "m"), staged_version(tmp_path, "m", "1") as folder:
        (folder / "artefact").write_text("half")
        assert not (tmp_path / "m" / "1").exists()
        assert folder.name.startswith(".")


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path, "old")
    with pytest.raises(RuntimeError), model_lock(tmp_path, "m"), staged_version(tmp_path, "m", "1") as folder:
        (folder / "artefact").write_text("half")
        raise RuntimeError
    assert visible(tmp_path) == ["1"]
    assert (tmp_path / "m" / "1" / "artefact").read_text() == "old"


def test_a_rebuild_replaces_all_of_the_old_version(tmp_path: Path) -> None:
    write(tmp_path, "old")
    (tmp_path / "m" / "1" / "leftover").write_text("old")
    write(tmp_path, "new")
    assert visible(tmp_path) == ["1"]
    assert [path.name for path in (tmp_path / "m" / "1").iterdir()] == ["artefact"]


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    leftover = tmp_path / "m" / ".building-1"
    leftover.mkdir(parents=True)
    (leftover / "artefact").write_text("half")
    write(tmp_path, "whole")
    assert visible(tmp_path) == ["1"]
    assert (tmp_path / "m" / "1" / "artefact").read_text() == "whole"


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), model_lock(tmp_path, "m"), staged_version(tmp_path, "m", "1"):
        raise KeyboardInterrupt
    assert visible(tmp_path) == []


@pytest.mark.slow
def test_two_builds_of_one_model_take_turns_and_a_killed_one_gives_its_turn_up(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tidegate.tools.build.staging import model_lock\n"
        "with model_lock(Path(sys.argv[1]), 'm'):\n"
        "    print('locked', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second,
    ):
        assert first.stdout is not None
        assert second.stdout is not None
        holder, waiter = first, second
        ready, _, _ = select.select([first.stdout, second.stdout], [], [], 30)
        assert len(ready) == 1
        if ready[0] is second.stdout:
            holder, waiter = second, first
        holder.kill()
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "locked\n"
        waiter.kill()
