"""What does not go together with several processes is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.gateway import GatewayConfig
from tidegate.config import ConfigError, load


@pytest.mark.parametrize(
    ("key", "section"), [("site_port", 8004), ("model_control", "explicit"), ("agreement", {"share": 0.01})]
)
def test_what_is_kept_in_one_process_is_refused_beside_workers(key: str, section: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"workers: 2 and {key} do not go together.*start several gateways"):
        load(GatewayConfig, workers=2, model_repository=tmp_path, **{key: section})
    assert load(GatewayConfig, workers=1, model_repository=tmp_path, **{key: section}).workers == 1


def test_no_workers_and_too_many_are_refused_by_name() -> None:
    for workers in (0, -1, 65):
        with pytest.raises(ConfigError, match="workers"):
            load(GatewayConfig, workers=workers)
