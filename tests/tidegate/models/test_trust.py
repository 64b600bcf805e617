"""Model files that can run code are refused unless an operator named them; pickles inside archives always are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.serving.host import minilm
from tidegate.engines.archive import refuse_pickles
from tidegate.engines.errors import EngineError
from tidegate.models.repository import RepositoryError
from tidegate.models.trust import TRUSTED, check_engine


@pytest.mark.parametrize("engine", ["torchscript", "tensorrt"])
def test_an_engine_whose_files_are_programs_runs_only_where_it_is_named(engine: str) -> None:
    manifest = minilm()
    variant = replace(manifest.variants[0], engine=engine)

    with pytest.raises(RepositoryError, match="'allowed_engines'"):
        check_engine(manifest, variant, TRUSTED)

    check_engine(manifest, variant, (*TRUSTED, engine))  # type: ignore[arg-type]
    check_engine(manifest, manifest.variants[0], TRUSTED)


def archive(folder: Path, **configs: object) -> Path:
    path = folder / "m.pt2"
    with zipfile.ZipFile(path, "w") as file:
        for name, config in configs.items():
            file.writestr(f"m/data/{name}_config.json", json.dumps(config))
    return path


PLAIN = {"config": {"w": {"path_name": "w", "use_pickle": False}}}
PICKLED = {"config": {"w": {"path_name": "w", "use_pickle": True}}}
UNSAID = {"config": {"w": {"path_name": "w"}}}


def test_an_archive_of_plain_tensors_passes(tmp_path: Path) -> None:
    refuse_pickles(archive(tmp_path, model_weights=PLAIN, model_constants={"config": {}}))


@pytest.mark.parametrize(("configs", "words"), [
    ({"model_weights": PICKLED}, "stored as a pickle"),
    ({"model_weights": PLAIN, "model_constants": PICKLED}, "stored as a pickle"),
    ({"model_weights": UNSAID}, "stored as a pickle"),
    ({"model_weights": []}, "no list"),
    ({}, "older form"),
])  # fmt: skip
def test_an_archive_with_a_pickle_is_refused(tmp_path: Path, configs: dict[str, object], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        refuse_pickles(archive(tmp_path, **configs))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"\x80\x04.")
    with pytest.raises(EngineError, match="no exported program"):
        refuse_pickles(path)


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.slow
def test_example_inputs_that_are_a_pickle_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from tidegate.engines.engine import load_engine

    class Double(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x * 2

    good, bad, mark = tmp_path / "good.pt2", tmp_path / "bad.pt2", tmp_path / "mark"
    monkeypatch.setenv("EVIL", str(mark))
    torch.export.save(torch.export.export(Double(), (torch.ones(2),)), good)
    pickled = io.BytesIO()
    torch.save(_Evil(), pickled)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for one in source.infolist():
            examples = one.filename.endswith(".pt")
            target.writestr(one.filename, pickled.getvalue() if examples else source.read(one))

    load_engine("torch-export", good, outputs=("y",))
    with contextlib.suppress(EngineError):
        load_engine("torch-export", bad, outputs=("y",))

    assert not mark.exists()
