"""A fallback model must exist apart from the model itself, lead nowhere back, and take and give the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.gateway.app import TWO_VARIANTS
from tidegate.models.fallback_model import fallback_problems
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, RepositoryError, save_manifest


def named(name: str, fallback: str = "", **changes: object) -> Manifest:
    return replace(TWO_VARIANTS, name=name, fallback_model=fallback, **changes)


@pytest.mark.parametrize(
    ("manifests", "told"),
    [
        ([named("a", "b"), named("b")], []),
        ([named("a", "b"), named("b", "c"), named("c")], []),
        ([named("a", "later")], []),
        ([named("a", "a")], ["a 3: fallback_model: 'a' is the model itself; name another one, or leave the key out"]),
        (
            [named("a", "b"), named("b", "a")],
            [
                "a 3: fallback_model: 'b' makes a circle (a -> b -> a); leave the key out of one of them",
                "b 3: fallback_model: 'a' makes a circle (b -> a -> b); leave the key out of one of them",
            ],
        ),
        (
            [named("a", "b"), named("b", pin="edge")],
            ["a 3: fallback_model: 'b' differs in pin; only a model that takes and gives the same can stand in"],
        ),
    ],
)
def test_each_mistake_is_named_with_its_way_out(manifests: list[Manifest], told: list[str]) -> None:
    assert list(fallback_problems(manifests)) == told


@given(st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("abcdef"), max_size=6))
def test_every_circle_is_found_and_nothing_else(names: dict[str, str]) -> None:
    manifests = [named(one, names.get(one, "")) for one in "abcdef"]

    def comes_back(start: str) -> bool:
        at, steps = names.get(start), 0
        while at is not None and at != start and steps < 10:
            at, steps = names.get(at), steps + 1
        return at == start

    assert {told.split()[0] for told in fallback_problems(manifests)} == {one for one in names if comes_back(one)}


def test_a_repository_with_a_circle_is_refused(tmp_path: Path) -> None:
    for name, fallback in (("a", "b"), ("b", "a")):
        save_manifest(tmp_path / name / "3", named(name, fallback))
    with pytest.raises(RepositoryError, match=r"a 3: fallback_model: 'b' makes a circle \(a -> b -> a\)"):
        Repository(tmp_path).manifests()
