"""The worker layout places workers on devices and cores."""

from __future__ import annotations

import pytest

from cloud_pool.core.sharing.worker_layout import WorkerPlace, worker_places


def test_one_worker_on_one_device_is_left_alone() -> None:
    assert worker_places(["auto"], workers=1, threads=0, cores=[0, 1]) == [WorkerPlace("0", "auto")]


def test_several_workers_divide_the_cores() -> None:
    assert [place.threads for place in worker_places(["cpu"], workers=2, threads=0, cores=range(9))] == [4, 4]


def test_threads_that_were_named_are_each_workers_own() -> None:
    assert [place.threads for place in worker_places(["cpu"], workers=2, threads=3, cores=range(4))] == [3, 3]


def test_each_device_gets_its_workers() -> None:
    places = worker_places(["cuda:0", "cuda:1"], workers=2, threads=0, cores=range(8))
    assert [(place.name, place.device) for place in places] == [
        ("0", "cuda:0"),
        ("1", "cuda:0"),
        ("2", "cuda:1"),
        ("3", "cuda:1"),
    ]


@pytest.mark.parametrize(
    ("workers", "cores", "own"),
    [
        (1, [3, 5], [{3, 5}]),
        (2, [0, 1, 2, 3], [{0, 1}, {2, 3}]),
        (2, [0, 1, 2], [{0, 1}, {2}]),
        (3, [4, 7], [{4}, {7}, {4}]),
    ],
)
def test_pinned_workers_have_cores_of_their_own_while_there_are_enough(
    workers: int, cores: list[int], own: list[set[int]]
) -> None:
    places = worker_places(["cpu"], workers=workers, threads=0, cores=cores, pinned=True)
    assert [set(place.cores) for place in places] == own
    assert all(place.threads == max(1, len(cores) // workers) for place in places)
