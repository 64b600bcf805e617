"""Which process computes a generating variant: by its engine, the device, and what is installed."""

from __future__ import annotations

import importlib.util
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.scheduling.device_arbiter import DeviceArbiter
from cloud_pool.vllm.vllm_config import VllmConfig
from cloud_pool.workers.device_worker import DeviceWorker, PoolLoadable
from cloud_pool.workers.generating_replica import GeneratingReplica
from cloud_pool.workers.generating_start import GeneratingStarts
from cloud_pool.workers.generating_workers import VariantWorkers
from tests.support.models.generative import TALKER
from tidegate.engines.generation.limits import cache_limit_bytes
from tidegate.metrics.generated import GeneratedCounts
from tidegate.models.manifest import EngineName
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.process import StartError
from tidegate.workers.sandbox import SandboxMode


def uses_vllm(
    folder: Path,
    device: str,
    *,
    engine: EngineName = "transformers",
    sandbox: SandboxMode = "auto",
    installed: bool = True,
    **keys: Any,
) -> bool:
    command = folder / "vllm"
    if installed:
        command.touch(mode=0o755)
    variant = replace(TALKER.variants[0], engine=engine)
    config = VllmConfig.model_validate({"executable": str(command), "start_timeout_s": 700.0, **keys})
    starts = GeneratingStarts(config, pool="p", sandbox=sandbox, cache_bytes=None)
    start = starts.of(PoolLoadable(TALKER, variant, folder / "x"), WorkerPlace("0", device))
    assert start.sandboxed != (start.within_s == 1000.0)
    return not start.sandboxed


def test_cuda_devices_have_it_where_it_is_found_and_processors_do_not(tmp_path: Path) -> None:
    assert not uses_vllm(tmp_path, "cuda", installed=False)
    assert uses_vllm(tmp_path, "cuda:1") and not uses_vllm(tmp_path, "cpu")
    assert not uses_vllm(tmp_path, "cuda", use="never") and uses_vllm(tmp_path, "cpu", use="always")


def test_engines_that_need_no_hugging_face_folder_stay_what_they_are(tmp_path: Path) -> None:
    assert not uses_vllm(tmp_path, "cuda", engine="paced", use="always")
    assert not uses_vllm(tmp_path, "cuda", engine="onnxruntime-genai", use="always")


def test_what_is_asked_for_and_cannot_be_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartError, match=r"'vllm.use' is always: there is no command .*environment of its own"):
        uses_vllm(tmp_path, "cpu", use="always", installed=False)
    with pytest.raises(StartError, match="key 'sandbox' requires"):
        uses_vllm(tmp_path, "cpu", use="always", sandbox="require")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"pip install 'tidegate\[vllm\]'"):
        uses_vllm(tmp_path, "cpu", use="always")
    assert not uses_vllm(tmp_path, "cuda"), "of itself it does without"


def test_a_manifest_that_does_not_say_what_a_token_takes_leaves_the_caches_to_the_server(tmp_path: Path) -> None:
    generation = TALKER.variants[0].generation
    assert generation is not None
    variant = replace(TALKER.variants[0], generation=replace(generation, cache_bytes=0))
    assert cache_limit_bytes(TALKER, variant, None) == inf


async def test_a_worker_is_given_the_caches_that_its_queue_counts_with() -> None:
    class Loaded(Exception):
        """The load is as far as this goes."""

    class WorkerThatNotes:
        async def load(self, loadable: PoolLoadable, *, cache_bytes: int) -> None:
            given.append(cache_bytes)
            raise Loaded

    given: list[int] = []
    one = PoolLoadable(TALKER, TALKER.variants[0], Path("x"))
    starts = GeneratingStarts(VllmConfig(), pool="p", sandbox="auto", cache_bytes=None)
    for configured in (None, 5000):
        replica = GeneratingReplica(
            one,
            WorkerPlace("0"),
            VariantWorkers(one, GeneratedCounts(), lambda _generating: []).generating,
            DeviceArbiter(),
            start=starts.of(one, WorkerPlace("0")),
            backoff=Backoff(lambda: 0.5),
            cache_bytes=configured,
        )
        with pytest.raises(Loaded):
            await replica.prepare(cast(DeviceWorker, WorkerThatNotes()))
    assert given[0] > cache_limit_bytes(TALKER, TALKER.variants[0], None) and given[1] == 5000
