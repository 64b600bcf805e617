"""For tests that subclass or patch what `make wheel-compiled` compiles: compiled classes allow neither."""

from __future__ import annotations

import pytest

from tidegate.runtime.compiled import is_compiled

interpreted_only = pytest.mark.skipif(is_compiled(), reason="compiled classes take no subclass and no patch")
