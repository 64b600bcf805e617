"""An API server of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.operator.cluster import OperatorCluster


@pytest.fixture
async def cluster() -> AsyncIterator[OperatorCluster]:
    async with OperatorCluster() as cluster:
        yield cluster
