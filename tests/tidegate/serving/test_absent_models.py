"""Models that are tried again: when, and what counts as tried."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tidegate.runtime.process import StartError
from tidegate.serving import absent_models
from tidegate.serving.absent_models import AbsentModels


def test_waits_double_up_to_a_quarter_of_an_hour(tmp_path: Path) -> None:
    async def bring(_: str) -> bool:
        return True

    absent = AbsentModels(tmp_path, bring=bring, is_served=lambda _: False, on_change=lambda: None)
    with capture_logs() as logs:
        for _ in range(7):
            absent.note("double", "its file is cut")
    assert [one["again_in_s"] for one in logs] == [30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0]
    assert absent.reasons == {"double": "its file is cut"}


async def test_files_that_change_while_they_are_read_are_tried_again_and_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_models, "LOOK_S", 0.01)
    came = asyncio.Event()
    (tmp_path / "double").mkdir()
    file = tmp_path / "double" / "int8.onnx"
    file.write_bytes(b"half")
    tries = 0

    async def bring(_: str) -> bool:
        nonlocal tries
        tries += 1
        file.write_bytes(b"half" * tries)  # a copy that goes on while the file is read
        if tries < 4:
            raise StartError("its file is cut")
        return True

    absent = AbsentModels(tmp_path, bring=bring, is_served=lambda _: False, on_change=came.set)
    absent.note("double", "its file is cut")
    file.write_bytes(b"more")
    with capture_logs() as logs:
        absent.begin()
        await asyncio.wait_for(came.wait(), 20.0)
        await absent.aclose()
    assert tries == 4 and absent.reasons == {}
    assert {one["again_in_s"] for one in logs if one["event"] == "a model is not served"} == {30.0}


async def test_models_that_are_missed_later_are_tried_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_models, "LOOK_S", 0.01)
    monkeypatch.setattr(absent_models, "FIRST_AGAIN_S", 0.01)
    came, tried = asyncio.Event(), list[str]()

    async def bring(model: str) -> bool:
        tried.append(model)
        return True

    absent = AbsentModels(tmp_path, bring=bring, is_served=lambda _: False, on_change=came.set)
    absent.begin()
    with capture_logs():
        for model in ("double", "rounds"):
            absent.note(model, "its file is cut")
            await asyncio.wait_for(came.wait(), 20.0)
            came.clear()
    await absent.aclose()
    assert tried == ["double", "rounds"] and absent.reasons == {}
