"""Logs: one line per change of state on stderr, with fields; stdout belongs to events.

A terminal gets colours, a file or a pipe gets `key=value` lines. Libraries that use the standard library's logging
(aiohttp, grpc, asyncio) speak through the same stream, from WARNING up. Metrics are counted in each process's own
file (`gateway/metrics.py`), so that an edge needs no prometheus client.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

Level = Literal["debug", "info", "warning", "error"]
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(process: str, *, level: Level = "info") -> None:
    """Set up logging for this process, once, at its start. `process` ("gateway main") stands on every line."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _name_process(process),
            *_renderers(sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def _name_process(process: str) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["process"] = process
        return event

    return add


def _renderers(terminal: bool) -> list[structlog.typing.Processor]:
    if terminal:
        return [structlog.dev.ConsoleRenderer()]
    order = ["timestamp", "level", "process", "event"]
    return [
        structlog.processors.format_exc_info,
        structlog.processors.LogfmtRenderer(key_order=order, bool_as_flag=False),
    ]
