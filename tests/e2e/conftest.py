"""One system for all tests that only use it; a test that breaks a part gets it whole and leaves it whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack, eventually
from tests.support.models.demo_models import keep_torch_out
from tidegate.models.repository import Repository
from tidegate.models.trusted_digests import FILE_NAME

MENDED_WITHIN_S = 90.0  # a killed pool comes back after 2 s and then warms up


_IN_ORDER = (
    "test_fault_matrix.py",
    "test_fault_matrix_parts.py",
    "test_fault_twin.py",
    "test_stack_links.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that break one shared fleet in turn keep the order of their file: how soon it calms differs by fault."""
    for name in _IN_ORDER:
        places = [place for place, item in enumerate(items) if item.path.name == name]
        ordered = sorted((items[place] for place in places), key=lambda item: item.location[1] or 0)
        for place, item in zip(places, ordered, strict=True):
            items[place] = item


@pytest.fixture(scope="session")
def models(demo_repository: Repository) -> Path:
    """The folder of the demo models, built once for all tests."""
    return demo_repository.root


@pytest.fixture(scope="session")
def digits(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a repository with the small one of the demo models, for tests that no text is asked in."""
    root = tmp_path_factory.mktemp("digits")
    shutil.copytree(models / "digits", root / "digits")
    shutil.copy(models / FILE_NAME, root)
    return root


@pytest.fixture(scope="session")
def light_digits(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for tests to which it does not matter what a pool computes with."""
    root = tmp_path_factory.mktemp("light") / "models"
    shutil.copytree(digits, root)
    keep_torch_out(root)
    return root


@pytest.fixture(scope="session")
def shared_stack(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"), "--models", str(models))
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """The running system, with every target ready."""
    eventually(shared_stack.whole, MENDED_WITHIN_S, f"every target ready\n{shared_stack.words}\n{shared_stack.logs}")
    return shared_stack
