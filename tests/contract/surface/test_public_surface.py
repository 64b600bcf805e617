"""Names and forms that others depend on stay as they were recorded, however the code behind them is named."""

from __future__ import annotations

import pytest

from tests.contract.surface.record import COMMAND, RECORDED, SNAPSHOTS, difference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_public_surface_is_the_recorded_one(name: str) -> None:
    changed = difference(name)
    assert not changed, (
        f"the public surface has changed: {name}. Lines with - are gone, lines with + are new:\n{changed}\n"
        f"Users depend on these names. Where the change is meant, record it and say why in the commit: {COMMAND}"
    )


def test_every_recorded_file_is_compared() -> None:
    assert {path.name for path in RECORDED.iterdir()} == {f"{name}.txt" for name in SNAPSHOTS}
