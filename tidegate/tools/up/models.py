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
from collections.abc import Callable
from pathlib import Path

from tidegate.models.repository import Repository
from tidegate.tools.build.demo.demo_models import RECIPES, STANDARD, intact_manifest
from tidegate.tools.up.children import ChildFailed, Event, append_to, describe_exit, log_tail, parse_event


def missing_models(root: Path, *, own: bool = False) -> list[str]:
    """The demo models that are not in the repository whole and in the version that this release builds.

    Args:
        own: the user named this repository; if it holds any model, nothing is missing from it. Nor is anything missing
            from one that holds a model of the user's.

    Raises:
        RepositoryError: a manifest of the user's own cannot be used.
    """
    served = {one.name for one in Repository(root).manifests()} if root.is_dir() else set()
    if served - set(RECIPES) or (own and served):
        return []
    return [name for name in STANDARD if intact_manifest(root, name, RECIPES[name][1]) is None]


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
