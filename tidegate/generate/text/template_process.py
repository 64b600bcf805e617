"""The process that renders chat templates: Jinja's sandbox, in a process that may be killed.

A template is a program that came with a model. The sandbox keeps it from Python's insides, but no sandbox bounds
what it takes: lists that hold themselves twice, forty times over, are one expression. So templates run here, with a
bound on memory, no secrets in the environment, and a parent that kills the process when a text takes too long
(`template_renderer.py`).

One line of JSON in, one out, in order: `RenderRequest` and `RenderAnswer`. The process ends with its input or its
parent, also while a template runs that has no end: where the parent is killed nobody kills this process.

Started by `template_renderer.py` as `python -m tidegate.generate.text.template_process PARENT_PID`, never by hand.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import IO, Any, Final, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidegate.generate.text.template_messages import RenderAnswer, RenderRequest
from tidegate.runtime.lifeline import die_with_parent, die_with_pipe

MEMORY_BYTES: Final = 2**30
_MOST_TEMPLATES: Final = 64  # compiled ones that are kept
_MOST_WORDS: Final = 300  # characters of an error


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`: its own words."""


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it means its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer each request until there are no more."""
    decode = msgspec.json.Decoder(RenderRequest).decode
    while line := requests.readline():
        answers.write(msgspec.json.encode(render(decode(line))) + b"\n")
        answers.flush()


def render(asked: RenderRequest) -> RenderAnswer:
    """The text, or why there is none."""
    try:
        pieces, room = [], asked.max_characters
        for piece in _compiled(asked.template).generate(asked.values):
            room -= len(piece)
            if room < 0:
                return RenderAnswer(asked.id, error=f"its text has more than {asked.max_characters} characters")
            pieces.append(piece)
        return RenderAnswer(asked.id, "".join(pieces))
    except _Refused as error:
        return RenderAnswer(asked.id, error=str(error)[:_MOST_WORDS])
    except MemoryError:
        return RenderAnswer(asked.id, error=f"it takes more than {MEMORY_BYTES >> 20} MiB of memory")
    except Exception as error:  # whatever a template may raise, it is an answer
        return RenderAnswer(asked.id, error=f"{type(error).__name__}: {error}"[:_MOST_WORDS])


@lru_cache(maxsize=_MOST_TEMPLATES)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates of published models are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().astimezone().strftime(format)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise _Refused(str(message))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), by=signal.SIGKILL)
    die_with_pipe(sys.stdin.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(b"\n")  # ready
    sys.stdout.buffer.flush()
    serve(sys.stdin.buffer, sys.stdout.buffer)
