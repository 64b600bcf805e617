"""`tidegate up` builds the demo models on its first start and keeps them for the next.

A repository of the user's own that holds models is served as it is, without the demo models: the user may have neither
torch nor the time to build them.

The building itself is `tidegate model build`, run as a child: it needs torch and a lot of memory for a minute, and
`tidegate up` should keep neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tidegate.models.repository import Repository
from tidegate.tools.build.demo.demo_models import RECIPES, STANDARD, intact_manifest, lacking
from tidegate.tools.build.errors import BuildError
from tidegate.tools.up.children import ChildFailed, Event, append_to, describe_exit, log_tail, parse_event


def wanted_models(named: str | None) -> tuple[str, ...]:
    """The demo models to serve: those that were named with commas between, or all whose packages are installed.

    Raises:
        BuildError: a name that is no demo model's, or whose packages are not installed.
    """
    if named is None:
        return tuple(name for name in RECIPES if not lacking(name))
    names = tuple(dict.fromkeys(one.strip() for one in named.split(",") if one.strip()))
    for name in names:
        if name not in RECIPES:
            raise BuildError(f"there is no demo model {name!r}: {', '.join(RECIPES)}")
        if missing := lacking(name):
            raise BuildError(f"the demo model {name} needs {', '.join(missing)}: {RECIPES[name].install}")
    return names


def left_out(wanted: tuple[str, ...]) -> list[str]:
    """What to say of demo models that are left out because their packages are not installed."""
    return [
        f"the demo model {name} is left out: {', '.join(missing)} not installed; {RECIPES[name].install}"
        for name in RECIPES
        if name not in wanted and (missing := lacking(name))
    ]


def missing_models(root: Path, *, own: bool = False, wanted: Sequence[str] = STANDARD) -> list[str]:
    """Of the demo models, those that are not in the repository whole and in the version that this release builds.

    Args:
        own: the user named this repository; if it holds any model, nothing is missing from it. Nor is anything missing
            from one that holds a model of the user's.

    Raises:
        RepositoryError: a manifest of the user's own cannot be used.
    """
    served = {one.name for one in Repository(root).manifests()} if root.is_dir() else set()
    if served - set(RECIPES) or (own and served):
        return []
    return [name for name in wanted if intact_manifest(root, name, RECIPES[name].version) is None]


async def build_models(names: list[str], root: Path, log_path: Path, on_event: Callable[[Event], None]) -> None:
    """Build models into the repository, telling of progress; cancelling it ends the build.

    Raises:
        ChildFailed: a build failed.
    """
    for name in names:
        await _build(name, root, log_path, on_event)


async def _build(name: str, root: Path, log_path: Path, on_event: Callable[[Event], None]) -> None:
    with append_to(log_path) as log:
        start_bytes = log.tell()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tidegate.cli", "--die-with-parent", str(os.getpid())),
            *("model", "build", name, "--repository", str(root), "--json-progress"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            reason = await _follow(process, on_event)
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code != 0:
        tail = [reason] if reason else log_tail(log_path, start_bytes)
        raise ChildFailed("\n".join([f"building the model {name} {describe_exit(code)} (log: {log_path}):", *tail]))


async def _follow(process: asyncio.subprocess.Process, on_event: Callable[[Event], None]) -> str:
    """Pass events on until the process closes its stdout; the reason of a failure if it gave one."""
    assert process.stdout is not None
    reason = ""
    async for line in process.stdout:
        event = parse_event(line)
        if event is not None and event["event"] == "failed":
            reason = str(event.get("reason", ""))
        elif event is not None:
            on_event(event)
    return reason
