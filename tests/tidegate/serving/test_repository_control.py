"""Repository control: what is wrong with one model keeps no other away, and the index has the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.cloud_pool.models import TEXT
from tidegate import clock
from tidegate.models.manifest import Manifest, Where
from tidegate.models.repository import RepositoryError, save_manifest
from tidegate.outcome import InternalError, InvalidRequest, ModelNotFound, OutOfMemory
from tidegate.runtime.process import StartError
from tidegate.serving import repository_control
from tidegate.serving.repository_control import ControlMode, RepositoryControl


class LoaderOfSome:
    """Serves what it is told to, but for the models that it is to fail on."""

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self.where: Where | None = "pool"
        self.failures = failures
        self.asked: list[str] = []
        self.serves: dict[str, Manifest] = {}

    def served(self) -> Mapping[str, Manifest]:
        return self.serves

    async def load(self, name: str) -> Manifest:
        self.asked.append(name)
        if name in self.failures:
            raise self.failures[name]
        self.serves[name] = msgspec.structs.replace(TEXT, name=name)
        return self.serves[name]

    async def restore(self, name: str) -> bool:
        return False

    async def unload(self, name: str) -> None:
        del self.serves[name]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        save_manifest(tmp_path / name / TEXT.version, msgspec.structs.replace(TEXT, name=name))
    return tmp_path


def control(root: Path, loader: LoaderOfSome, mode: ControlMode = "poll") -> RepositoryControl:
    return RepositoryControl("pool/p", root, loader, mode=mode)


async def test_a_model_that_fails_by_a_defect_is_tried_once_and_those_after_it_are_loaded(root: Path) -> None:
    loader = LoaderOfSome({"a": OverflowError("int too large to convert to float")})
    followed = control(root, loader)
    await followed.poll()
    await followed.poll()
    assert loader.asked == ["a", "b", "c"]
    (status,) = (await followed.statuses()).values()
    assert (status.state, status.reason) == ("UNAVAILABLE", "OverflowError: int too large to convert to float")


async def test_a_defect_of_a_load_is_an_internal_error_with_its_words(root: Path) -> None:
    with pytest.raises(InternalError, match="model 'a' could not be loaded: ZeroDivisionError: x"):
        await control(root, LoaderOfSome({"a": ZeroDivisionError("x")}), "explicit").load("a")


async def test_at_the_start_one_wrong_model_keeps_no_other_away(root: Path) -> None:
    loader = LoaderOfSome({"a": StartError("too large")})
    (root / "b" / TEXT.version / "model.yaml").write_text("name: [")
    begun = control(root, loader, "explicit")
    await begun.begin()
    async with begun:
        assert set(loader.served()) == {"c"}
        reasons = {name: status.reason for (name, _), status in (await begun.statuses()).items()}
        assert reasons["a"] == "too large" and "is not valid YAML" in reasons["b"]


async def test_a_start_at_which_no_model_is_right_fails_with_all_reasons(root: Path) -> None:
    failing = LoaderOfSome({name: StartError(f"no {name}") for name in ("a", "b", "c")})
    with pytest.raises(StartError, match=r"could be loaded:\na: no a\nb: no b\nc: no c"):
        await control(root, failing).begin()


async def test_an_empty_repository_is_a_start_without_models(tmp_path: Path) -> None:
    await control(tmp_path, LoaderOfSome({})).begin()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["poll", "explicit"])
async def test_what_failed_at_the_start_for_another_reason_than_its_files_is_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, mode: ControlMode
) -> None:
    monkeypatch.setattr(repository_control, "FIRST_AGAIN_S", 0.02)
    loader = LoaderOfSome({"a": OutOfMemory("another process holds it"), "b": RepositoryError("b: cut off")})
    begun = RepositoryControl("pool/p", root, loader, mode=mode, poll_s=0.01)
    await begun.begin()
    async with begun, asyncio.timeout(20.0):
        assert set(loader.served()) == {"c"}
        while loader.asked.count("a") < 3:
            await clock.sleep(0.01)
        del loader.failures["a"]
        while "a" not in loader.served():
            await clock.sleep(0.01)
        await clock.sleep(0.1)
    assert loader.asked.count("b") == 1 and loader.asked[-1] == "a"


async def test_a_broken_model_that_is_not_wanted_is_not_missed(root: Path) -> None:
    (root / "b" / TEXT.version / "model.yaml").write_text("name: [")
    only_a = RepositoryControl("edge/e", root, LoaderOfSome({}), mode="poll", wanted=lambda name: name == "a")
    await only_a.begin()
    assert only_a.failed == {}


async def test_a_model_that_was_unloaded_is_not_missed_though_it_could_not_be_replaced_before(root: Path) -> None:
    loader = LoaderOfSome({})
    asked = control(root, loader, "explicit")
    await asked.load("a")
    loader.failures = {"a": OutOfMemory("another process holds it")}
    (root / "a" / TEXT.version / "model.yaml").touch()
    save_manifest(root / "a" / "9", msgspec.structs.replace(TEXT, name="a", version="9"))
    with pytest.raises(OutOfMemory):
        await asked.load("a")
    await asked.unload("a")
    assert asked.failed == {}


def put(root: Path, name: str, version: str, text: str = "") -> None:
    path = save_manifest(root / name / version, msgspec.structs.replace(TEXT, name=name, version=version))
    if text:
        path.write_text(text)


async def test_a_version_that_cannot_be_read_is_in_the_index_and_a_lower_one_is_loaded(root: Path) -> None:
    loader = LoaderOfSome({})
    put(root, "a", "9", "name: [")
    begun = control(root, loader)
    with capture_logs() as logs:
        await begun.poll()
        await begun.poll()
    assert loader.asked == ["a", "b", "c"]
    ((name, status),) = (await begun.statuses()).items()
    assert name == ("a", "9") and status.state == "UNAVAILABLE" and "is not valid YAML" in status.reason
    (said,) = [one for one in logs if one["event"] == "a version cannot be read, and others stand in"]
    assert (said["model"], said["version"]) == ("a", "9")
    put(root, "a", "9")
    await begun.poll()
    assert loader.asked == ["a", "b", "c", "a"]
    assert await begun.statuses() == {}


@pytest.mark.parametrize("mode", ["poll", "explicit"])
async def test_what_serves_is_not_replaced_by_a_lower_one_as_its_manifest_is_damaged(
    root: Path, mode: ControlMode
) -> None:
    put(root, "a", "0.1")
    loader = LoaderOfSome({})
    begun = control(root, loader, mode)
    await begun.poll()
    put(root, "a", TEXT.version, "name: [")
    await begun.poll()
    assert loader.asked == ["a", "b", "c"] and begun.failed == {}
    if mode == "explicit":
        with pytest.raises(InvalidRequest, match=r"what serves is kept: .*is not valid YAML"):
            await begun.load("a")
    assert loader.asked == ["a", "b", "c"]


async def test_a_version_that_is_for_another_place_is_passed_over_and_told_once(root: Path) -> None:
    variants = tuple(msgspec.structs.replace(one, where=("edge",)) for one in TEXT.variants)
    save_manifest(root / "a" / "9", msgspec.structs.replace(TEXT, name="a", version="9", variants=variants))
    begun = control(root, LoaderOfSome({}))
    with capture_logs() as logs:
        await begun.poll()
        await begun.poll()
    (said,) = [one for one in logs if one["event"] == "a version is passed over, and a lower one serves"]
    assert (said["model"], said["version"]) == ("a", "9") and "no variant for pools" in said["reason"]
    assert await begun.statuses() == {}


async def test_a_version_that_could_not_replace_a_lower_one_is_in_the_index(root: Path) -> None:
    loader = LoaderOfSome({})
    begun = control(root, loader)
    await begun.poll()
    loader.failures = {"a": RepositoryError("a/9: cut off")}
    put(root, "a", "9")
    await begun.poll()
    ((of, status),) = (await begun.statuses()).items()
    assert (of, status.state, status.reason) == (("a", "9"), "UNAVAILABLE", "a/9: cut off")


async def test_a_model_that_could_not_be_loaded_and_is_unloaded_is_tried_no_more(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository_control, "FIRST_AGAIN_S", 0.02)
    loader = LoaderOfSome({"a": OutOfMemory("another process holds it"), "b": OutOfMemory("likewise")})
    begun = control(root, loader, "explicit")
    await begun.begin()
    async with begun, asyncio.timeout(20.0):
        await begun.unload("a")
        asked = loader.asked.count("a")
        loader.failures.clear()
        while "b" not in loader.served():
            await clock.sleep(0.005)
        assert loader.asked.count("a") == asked and "a" not in loader.served() and not begun.failed
        assert (await begun.statuses())["a", TEXT.version].reason == "unloaded"
        with pytest.raises(ModelNotFound, match="no model 'nobody' on pool/p to unload"):
            await begun.unload("nobody")
