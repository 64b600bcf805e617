"""Logs: one line per change of state on stderr, with fields; stdout belongs to events.

A terminal gets colours, a file or a pipe gets `key=value` lines, and `log_format: json` gets an object a line.
Libraries that use the standard library's logging (aiohttp, grpc, asyncio) write to the same stream in the same
form, from WARNING up. A line that belongs to a traced request carries its `trace_id`.

Levels can be changed while the process runs, for all or for the modules under one name: over the gateway's admin port
(`tidegate log-level`), and at any process by the signal SIGRTMIN, which turns `debug` on and off again. So a line
below its level is dropped when it is logged, by the levels of that moment, and not when the loggers are made. Audit
lines have no level: who may turn down the log must not be able to act unseen.

Metrics are counted in each process's own file (`gateway/observe/metrics/`), so that an edge needs no prometheus client.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal, TextIO

import structlog

from tidegate.trace_context import current

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]
NUMBERS: Final[Mapping[str, int]] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
AUDIT: Final = "tidegate.audit"  # the logger of audit lines, which no level drops
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and the line ends of tracebacks
MOST_MODULES: Final = 100  # with levels of their own
_BY_METHOD: Final = {**NUMBERS, "warn": 30, "exception": 40, "critical": 50, "fatal": 50}


class Levels:
    """The log level of each module, changeable at run time; the longest configured prefix of a module's name counts."""

    def __init__(self, level: Level = "info") -> None:
        self.level: Level = level
        self.modules: dict[str, Level] = {}
        self._before: Level | None = None

    def set(self, level: Level, module: str = "") -> None:
        """Set the level of `module` and all under it, or of all modules that have no level of their own.

        Raises:
            ValueError: `MOST_MODULES` modules have levels already, or the module is the audit log.
        """
        if module == AUDIT or module.startswith(f"{AUDIT}."):
            raise ValueError(f"{module} has no level: audit lines are always written")
        if not module:
            self.level, self._before = level, None
        elif module not in self.modules and len(self.modules) >= MOST_MODULES:
            raise ValueError(f"{MOST_MODULES} modules have levels of their own; clear some first")
        else:
            self.modules[module] = level

    def clear(self, module: str) -> None:
        """Remove the module's own level."""
        self.modules.pop(module, None)

    def turn(self) -> Level:
        """Switch to `debug` for all, or back to the level before; returns the new level."""
        self.level, self._before = ("debug", self.level) if self._before is None else (self._before, None)
        return self.level

    def allows(self, module: str, number: int) -> bool:
        # The level first: nearly all lines are decided by it, and a dropped line must cost next to nothing.
        return number >= NUMBERS[self.of(module) if self.modules else self.level] or module == AUDIT

    def of(self, module: str) -> Level:
        while module:
            if (level := self.modules.get(module)) is not None:
                return level
            module = module.rpartition(".")[0]
        return self.level

    def __repr__(self) -> str:
        return f"<Levels {self.level} {self.modules}>"


LEVELS: Final = Levels()  # one a process, as its loggers are


def configure_logging(process: str, *, level: Level = "info", form: Format = "text") -> None:
    """Set up logging for this process, once, at its start. `process` ("gateway main") stands on every line."""
    LEVELS.set(level)
    marks: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _name_process(process),
        name_trace,
    ]
    renderers = _renderers(form, sys.stderr.isatty())
    structlog.configure(
        processors=[drop_low, *marks, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=lambda *names: _Lines(str(names[0]) if names else "", sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        foreign_pre_chain=[_name_logger, *marks[1:]],
    )
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class _Lines(structlog.WriteLogger):
    """Writes to a stream, and knows for which module."""

    def __init__(self, name: str, stream: TextIO) -> None:
        super().__init__(stream)
        self.name = name
        self._stream = stream

    def msg(self, message: str) -> None:
        """Write one line. Where nothing takes it the line is lost, and not the request or the task that logged it.

        The disk may be full, the program that read the log may have ended (`2>&1 | tee`), the terminal may be gone.
        """
        try:
            super().msg(message)
        except OSError:
            pass
        except ValueError:  # the stream was closed
            if not self._stream.closed:
                raise

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def drop_low(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """First of all: what is below its module's level costs no more than this."""
    if not LEVELS.allows(getattr(logger, "name", ""), _BY_METHOD.get(method, 50)):
        raise structlog.DropEvent
    return event


def name_trace(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The trace of the request that the line belongs to, if it has one."""
    if (trace := current.get()) is not None:
        event.setdefault("trace_id", trace.hex_id)
    return event


def _name_process(process: str) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["process"] = process
        return event

    return add


def _name_logger(_logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A log record of the standard library: its level and its logger."""
    record: logging.LogRecord = event["_record"]
    event["level"], event["logger"] = record.levelname.lower(), record.name
    return event


def _without_controls(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What peers say of themselves is logged: nothing in it is to be obeyed by the terminal that shows the log."""
    for key, value in event.items():
        if isinstance(value, str) and _CONTROLS.search(value):
            event[key] = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value)
    return event


def _renderers(form: Format, terminal: bool) -> list[structlog.typing.Processor]:
    # Tracebacks without the values of local variables, which both show if not told: prompts, keys and tokens are there.
    if form == "json":
        where = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(where), structlog.processors.JSONRenderer(default=str)]
    if terminal:
        return [
            _without_controls,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.RichTracebackFormatter(show_locals=False)),
        ]
    order = ["timestamp", "level", "process", "event"]
    return [
        structlog.processors.format_exc_info,
        _without_controls,
        structlog.processors.LogfmtRenderer(key_order=order, bool_as_flag=False),
    ]
