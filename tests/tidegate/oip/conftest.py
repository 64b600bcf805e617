from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.serving.host import FakeHost
from tests.support.serving.oip_servers import Servers, serving


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    async with serving(FakeHost()) as running:
        yield running
