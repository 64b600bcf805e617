"""`tidegate.testing` as users import it: its public names, and what they bring into a user's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate.testing

ROOT = Path(__file__).parents[3]
NOT_FOR_USERS = {"simulator", "gateway", "edge_agent", "cloud_pool", "grpc", "torch", "onnxruntime", "aiohttp", "paho"}


def modules_after(program: str) -> list[str]:
    """Every module that a fresh interpreter has imported when the program has run."""
    ran = subprocess.run(
        [sys.executable, "-c", f"{program}; import json, sys; print(json.dumps(sorted(sys.modules)))"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: list[str] = json.loads(ran.stdout)
    return found


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    for name in tidegate.testing.__all__:
        assert getattr(tidegate.testing, name).__name__ == name
    assert set(tidegate.testing.__all__) <= set(dir(tidegate.testing))
    assert tidegate.testing.__all__ == sorted(tidegate.testing.__all__, key=lambda name: (name.islower(), name))


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'tidegate\.testing' has no attribute 'LinkProxies'"):
        tidegate.testing.LinkProxies  # noqa: B018


@pytest.mark.slow
def test_neither_the_plugin_nor_a_public_name_imports_a_process_the_simulator_grpc_or_a_runtime() -> None:
    found = modules_after("import tidegate.testing.pytest_plugin; from tidegate.testing import *")
    assert "tidegate.testing.links" in found
    assert "tidegate.testing.stack" in found
    assert {name for name in found if name.partition(".")[0] in NOT_FOR_USERS} == set()
    assert [name for name in found if name.startswith("tidegate.rpc")] == []


@pytest.mark.slow
def test_importing_the_package_imports_none_of_its_modules() -> None:
    found = modules_after("import tidegate.testing")
    assert [name for name in found if name.startswith("tidegate")] == ["tidegate", "tidegate.testing"]
