"""The paced engine: zeros of the right shape after the time that its table has, and errors that name the key."""

from __future__ import annotations

import asyncio
from math import log
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from tidegate import clock
from tidegate.engines.engine import EngineError, load_engine
from tidegate.engines.paced import PacedEngine, PacedModel, read_pace
from tidegate.models.manifest import TensorSpec
from tidegate.outcome import InternalError
from tidegate.types import Datatype
from tidegate.workers.process import EngineSpec, WorkerProcess

PACE = PacedModel(
    input="ids",
    inputs={"ids": ("batch", "sequence"), "scale": ("batch",)},
    cost_ms=((1.0, 1.0), (101.0, 2.0)),
    outputs=(
        TensorSpec("vector", Datatype.FP32, ("batch", 4)),
        TensorSpec("ids_again", Datatype.INT64, ("batch", "sequence")),
        TensorSpec("label", Datatype.BYTES, ("batch",)),
        TensorSpec("half", Datatype.BF16, ("batch", 1)),
    ),
)
IDS = {"ids": np.ones((3, 5), dtype=np.int64)}


def engine(folder: Path, *, slow: float = 1.0, outputs: tuple[str, ...] = ("vector",), **changes: Any) -> PacedEngine:
    path = folder / "pace.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(msgspec.structs.replace(PACE, **changes))))
    loaded = load_engine("paced", path, outputs=outputs, paced_slow=slow)
    assert isinstance(loaded, PacedEngine)
    return loaded


def takes_s(one: PacedEngine, inputs: dict[str, Any]) -> float:
    began_at = clock.now()
    one.infer(inputs)
    return clock.now() - began_at


def test_answers_are_zeros_of_the_shapes_that_go_with_the_inputs(tmp_path: Path) -> None:
    answer = engine(tmp_path, outputs=("vector", "ids_again", "label", "half")).infer(IDS)
    assert {name: (array.shape, array.dtype.str) for name, array in answer.items()} == {
        "vector": ((3, 4), "<f4"),
        "ids_again": ((3, 5), "<i8"),
        "label": ((3,), "|O"),
        "half": ((3, 1), "<u2"),
    }
    assert not any(array.any() for array in answer.values())


def test_an_output_that_the_file_does_not_know_is_a_number_a_row(tmp_path: Path) -> None:
    assert engine(tmp_path, outputs=("score",)).infer(IDS)["score"].shape == (3,)


def test_a_call_takes_no_less_than_its_table_says(tmp_path: Path) -> None:
    one = engine(tmp_path, cost_ms=((1.0, 4.0), (100.0, 8.0)))
    assert takes_s(one, {"ids": np.ones((1, 1), dtype=np.int64)}) >= 0.004
    assert takes_s(one, {"ids": np.ones((4, 25), dtype=np.int64)}) >= 0.008


def test_a_slow_process_takes_so_many_times_as_long(tmp_path: Path) -> None:
    assert takes_s(engine(tmp_path, slow=6.0), {"ids": np.ones((1, 1), dtype=np.int64)}) >= 0.006


@pytest.mark.parametrize(
    ("feature", "inputs", "units"),
    [
        ("tokens", {"ids": np.ones((3, 5), dtype=np.int64)}, 15),
        ("items", {"ids": np.ones((3, 5), dtype=np.int64)}, 3),
        ("bytes", {"ids": np.ones((3, 5), dtype=np.int64)}, 120),
        ("bytes", {"ids": np.full((1, 2), b"four", dtype=object)}, 16),
    ],
)
def test_work_is_counted_as_the_manifest_counts_it(
    tmp_path: Path, feature: str, inputs: dict[str, Any], units: int
) -> None:
    table = ((units - 1.0, 1e-3), (float(units), 5.0), (units + 1.0, 5e3))  # one unit more would take seconds
    assert 0.005 <= takes_s(engine(tmp_path, feature=feature, cost_ms=table), inputs) < 4.0


def test_noise_is_lognormal_and_the_same_after_each_load(tmp_path: Path) -> None:
    def drawn() -> list[float]:
        one = engine(tmp_path, noise_sigma=0.3, cost_ms=((1.0, 1.0),))
        return [one.draw_seconds(IDS["ids"]) for _ in range(500)]

    seconds = drawn()
    logs = [log(one / 1e-3) for one in seconds]
    assert abs(fmean(logs)) < 0.05
    assert 0.27 < pstdev(logs) < 0.33
    assert drawn() == seconds


def test_a_process_that_stood_still_has_computed_nothing_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [10.0], [0]

    def block_until(instant: float) -> None:
        waits[0] += 1
        now[0] = instant + (0.5 if waits[0] == 2 else 0.001)  # stopped for half a second in the second slice

    monkeypatch.setattr(clock, "block_until", block_until)
    with clock.reading(lambda: now[0]):
        engine(tmp_path, cost_ms=((1.0, 300.0),)).infer(IDS)
    assert now[0] == pytest.approx(10.0 + 0.3 + 0.5, abs=0.003)


def test_an_input_that_is_missing_or_of_another_rank_is_an_engine_error(tmp_path: Path) -> None:
    one = engine(tmp_path)
    with pytest.raises(EngineError, match=r"pace\.yaml takes ids, but scale came"):
        one.infer({"scale": np.ones(3)})
    with pytest.raises(EngineError, match=r"takes ids as \['batch', 'sequence'\], not \[3\]"):
        one.infer({"ids": np.ones(3)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cost_ms": []}, "key 'cost_ms': a cost table needs at least one point"),
        ({"cost_ms": [[1, -2]]}, "key 'cost_ms': cost points must have"),
        ({"cost_ms": "8:8"}, "key 'cost_ms': Expected `array`"),
        ({"cost_ms": [[1, "x"]]}, "key 'cost_ms"),
        ({"noise_sigma": 7}, "key 'noise_sigma': must be from 0 to 2, not 7"),
        ({"input": "idz"}, "key 'input': 'idz' is not one of `inputs` (ids, scale)"),
        ({"outputs": [{"name": "v", "datatype": "FP32", "shape": ["width"]}]}, "key 'outputs.v.shape': 'width' is not"),
        ({"cost": []}, "unknown field `cost`"),
        ({"feature": "words"}, "key 'feature': Invalid enum value 'words'"),
    ],
)
def test_a_bad_file_is_an_error_with_its_name_the_key_and_the_way_out(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(PACE) | change))
    with pytest.raises(EngineError) as raised:
        read_pace(path)
    assert str(raised.value).startswith(str(path))
    assert words in str(raised.value)
    assert "tidegate model paced" in str(raised.value)


def test_what_is_no_yaml_or_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "no.yaml"
    with pytest.raises(EngineError, match=r"no\.yaml: there is no such artefact"):
        read_pace(path)
    path.write_text("{")
    with pytest.raises(EngineError, match=r"no\.yaml: is no readable YAML"):
        read_pace(path)


def test_it_says_what_it_is(tmp_path: Path) -> None:
    assert repr(engine(tmp_path, slow=2.0)).startswith("<PacedEngine pace.yaml 2 times slower than <CostTable")


@pytest.mark.slow
async def test_in_a_worker_it_is_an_engine_like_any_other(tmp_path: Path) -> None:
    slow = engine(tmp_path, cost_ms=((1.0, 20.0),)).artefact
    async with WorkerProcess("paced") as worker:
        await worker.load(EngineSpec("m", "paced", slow, ("vector",), paced_slow=2.0))
        first, second, third = (asyncio.create_task(worker.infer("m", IDS)) for _ in range(3))
        await asyncio.sleep(0)  # noqa: TID251 - gives a turn, waits for nothing
        second.cancel()
        assert (await first).compute_s >= 0.040
        assert (await third).outputs["vector"].shape == (3, 4)
        assert second.cancelled()
        (tmp_path / "bad.yaml").write_text("cost_ms: []")
        with pytest.raises(InternalError, match=r"bad\.yaml"):
            await worker.load(EngineSpec("bad", "paced", tmp_path / "bad.yaml", ("vector",)))
        assert worker.alive
