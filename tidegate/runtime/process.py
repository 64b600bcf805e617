"""`run` is the life of every process: it reads the configuration, ties the process to its parent, and ends on a signal.

    options → configuration → logs → serve(config), cancelled by the first SIGINT, SIGTERM or SIGHUP → exit

A start that cannot succeed ends with exit code 1, one `failed` event on stdout and the same words on stderr, without a
traceback: the reasons that a person can mend (`ConfigError`, `RepositoryError`, `StartError`) are kept apart from
defects, which keep their tracebacks. A signal during a long start ends it as well. A second signal changes nothing: it
must not cut the drain that the first one began. A process that hangs is ended some time after its parent. SIGRTMIN
turns debugging logs on, and off again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import click
import structlog

from tidegate.config import ConfigError, ProcessConfig, load, variables_of_no_key
from tidegate.models.repository import RepositoryError
from tidegate.runtime import events
from tidegate.runtime.lifeline import die_with_parent, end_after_parent
from tidegate.runtime.logs import LEVELS, Format, Level, configure_logging
from tidegate.runtime.service_manager import STOPPING, ServiceManager

EXITS_WITHIN_S: Final = 10.0  # of its drain's end, before it is taken to hang
log = structlog.get_logger(__name__)


class StartError(Exception):
    """A process cannot start; the message names the configuration key and the way out."""


class ProcessSettings(Protocol):
    """The settings that every process's configuration has."""

    @property
    def name(self) -> str: ...

    @property
    def drain_s(self) -> float: ...

    @property
    def log_level(self) -> Level: ...

    @property
    def log_format(self) -> Format: ...


ConfigT = TypeVar("ConfigT", bound=ProcessConfig)
Serve = Callable[[ConfigT], Coroutine[Any, Any, None]]
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def process_options(role: str) -> Callable[[CommandT], CommandT]:
    """The options that every process's command takes: `path` and `parent_pid`."""
    config = click.option(
        "--config",
        "path",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"YAML file; `tidegate config schema {role}` lists its keys. Without one: the defaults.",
    )
    parent = click.option(
        "--die-with-parent", "parent_pid", type=int, hidden=True, help="End when the process of this id ends."
    )

    def decorate(command: CommandT) -> CommandT:
        return config(parent(command))

    return decorate


def run(
    role: str,
    model: type[ConfigT],
    serve: Serve[ConfigT],
    *,
    path: Path | None,
    parent_pid: int | None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    read: Callable[[], ConfigT] | None = None,
) -> None:
    """Serve until a signal; exits with 1 and the reason when the process cannot start.

    Args:
        read: gives the configuration; None: it is read from `path` and the environment.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    with suppress(OSError, ValueError, AttributeError, RuntimeError):  # there is no stderr
        faulthandler.enable()  # who ends a hanging process by SIGABRT (systemd, a parent) has it say where it stands
    try:
        config = load(model, path) if read is None else read()
        named: ProcessSettings = cast(Any, config)
        configure_logging(f"{role}/{named.name}", level=named.log_level, form=named.log_format)
        for words in variables_of_no_key(model):
            log.warning("a variable is not read", reason=words)
        if parent_pid is not None:
            end_after_parent(parent_pid, after_s=named.drain_s + EXITS_WITHIN_S)
        manager = ServiceManager.of(os.environ, os.getpid() if parent_pid is None else None)
        with events.heard_by(manager.hear), asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_served(serve(config), manager))
    except (ConfigError, RepositoryError, StartError) as error:
        events.emit("failed", role=role, reason=str(error))
        click.echo(f"the {role} cannot start: {error}", err=True)
        sys.exit(1)


async def _served(serving: Coroutine[Any, Any, None], manager: ServiceManager) -> None:
    async with manager.watching():
        await until_signal(serving, on_stop=lambda: manager.say(STOPPING))


async def until_signal(serving: Coroutine[Any, Any, None], *, on_stop: Callable[[], None] = lambda: None) -> None:
    """Await `serving`, and cancel it once at the first signal that asks for its end; its own errors come through.

    A hangup (SIGHUP) is among them, of a terminal that was closed as of an operator who means a process that reads its
    configuration anew: by itself it would end the process at once, with all that is under way. Under `nohup` it stays
    ignored, and a gateway in several processes takes it for itself.
    """
    task = asyncio.ensure_future(serving)
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            on_stop()
            task.cancel()

    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for signum in (signal.SIGINT, signal.SIGTERM, *(() if ignores_hangup else (signal.SIGHUP,))):
        loop.add_signal_handler(signum, stop)
    loop.add_signal_handler(signal.SIGRTMIN, _turn_levels)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            task.cancel()
            raise


def _turn_levels() -> None:
    log.error("log level changed", level=LEVELS.turn(), by="SIGRTMIN")
