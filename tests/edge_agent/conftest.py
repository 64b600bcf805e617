"""What every rollout to an agent in this process begins with: a server of artefacts, and a device's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.edge.rollout_edge import AUTHOR
from tests.support.edge.rollouts import ArtefactServer
from tests.support.models.tiny_models import tiny_repository


@pytest.fixture
def server() -> Iterator[ArtefactServer]:
    with ArtefactServer() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_repository(tmp_path / "models")
    AUTHOR.trust_file(tmp_path / "trusted")
    return tmp_path
