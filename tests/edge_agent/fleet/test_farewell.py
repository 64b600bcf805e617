"""The reason of a goodbye is one word in a file, used once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.fleet.farewell import FILE_NAME, forget_farewell, take_farewell


@pytest.mark.parametrize("word", ["update", "sleep", "shutdown", " update\n"])
def test_a_known_word_is_taken_once(tmp_path: Path, word: str) -> None:
    (tmp_path / FILE_NAME).write_text(word)
    assert take_farewell(tmp_path) == word.strip()
    assert take_farewell(tmp_path) == "shutdown"


@pytest.mark.parametrize("content", [b"", b"upgrade", b"\xff\xfe", b"update " * 100_000])
def test_anything_else_is_a_shutdown_and_is_removed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert take_farewell(tmp_path) == "shutdown"
    assert not (tmp_path / FILE_NAME).exists()


def test_a_folder_in_its_place_or_no_folder_at_all_is_no_reason(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert take_farewell(tmp_path) == "shutdown"
    assert take_farewell(tmp_path / "nowhere") == "shutdown"
    forget_farewell(tmp_path / "nowhere")
