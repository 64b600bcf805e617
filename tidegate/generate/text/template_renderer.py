"""Renders chat templates in a process of their own, each within its time.

The process starts with the first text, and again after one that took too long: that one's process is killed. Texts wait
for each other, since rendering takes a fraction of a millisecond. A caller that leaves while its text is rendered
leaves an answer behind: the next one waits for what is left of that text's time, and its own time begins only then.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from tidegate.generate.text.template_messages import RenderAnswer, RenderRequest
from tidegate.outcome import InternalError, InvalidRequest
from tidegate.runtime.spawned_process import PipedProcess, spawn_piped

MAX_CHARACTERS: Final = 4 * 2**20
RENDER_S: Final = 1.0
_PROGRAM: Final = "tidegate.generate.text.template_process"
_START_S: Final = 30.0  # Python and Jinja, on a machine that is busy
_LINE_BYTES: Final = 8 * MAX_CHARACTERS  # JSON takes up to six bytes a character
_KEPT_VARIABLES: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")


class _LeftText(NamedTuple):
    """A text whose caller has left while it was rendered, and the loop's time at which it has taken too long."""

    id: int
    until: float


class TemplateRenderer:
    """Owns the process; `aclose` ends it. A renderer that was closed starts again when it is used."""

    def __init__(self, *, render_s: float = RENDER_S, max_characters: int = MAX_CHARACTERS) -> None:
        self._render_s = render_s
        self._max_characters = max_characters
        self._process: PipedProcess | None = None
        self._turn = asyncio.Lock()
        self._id = 0
        self._left: _LeftText | None = None  # until its answer has come, or its process has ended

    async def render(self, template: str, values: Mapping[str, Any]) -> str:
        """The text of `template` with these values.

        Raises:
            InvalidRequest: the template refuses the values, or takes too long or too much for them.
        """
        async with self._turn:
            await self._pass_over()
            process = await self._started()
            self._id += 1
            asked = RenderRequest(self._id, template, dict(values), self._max_characters)
            until = asyncio.get_running_loop().time() + self._render_s
            try:
                async with asyncio.timeout_at(until):
                    answer = await _exchange(process, asked)
            except asyncio.CancelledError:
                self._left = _LeftText(asked.id, until)
                raise
            except TimeoutError:
                await self._kill()
                raise InvalidRequest(
                    f"the model's chat template took more than {self._render_s:g} s for these messages"
                ) from None
            except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
                await self._kill()
                raise InvalidRequest("the model's chat template took too much memory for these messages") from error
        if answer.error is not None:
            raise InvalidRequest(f"the model's chat template refuses these messages: {answer.error}")
        return answer.text

    async def start(self) -> None:
        """Start the process now, so that no caller waits for it."""
        async with self._turn:
            await self._started()

    async def aclose(self) -> None:
        async with self._turn:
            await self._kill()

    async def _pass_over(self) -> None:
        """Wait for the answer that nobody waits for any more, if there is one; a process that does not give it ends."""
        left, process = self._left, self._process
        if left is None or process is None:
            return
        try:
            async with asyncio.timeout_at(left.until):
                await _answer(process, left.id)
        except (TimeoutError, OSError, EOFError, ValueError, msgspec.DecodeError):
            await self._kill()
        self._left = None

    async def _started(self) -> PipedProcess:
        if self._process is not None and self._process.returncode is not None:
            await self._kill()
        if self._process is None:
            self._process = process = await spawn_piped(
                # -P: a folder in which we were started may have our names
                [sys.executable, "-P", "-m", _PROGRAM, str(os.getpid())],
                line_bytes=_LINE_BYTES,
                env={key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ},  # and no secrets
            )
            try:
                async with asyncio.timeout(_START_S):
                    ready = await process.stdout.readline()
            except BaseException:
                await self._kill()
                raise
            if not ready:
                await self._kill()
                raise InternalError("the process for chat templates does not start: see its error output")
        return self._process

    async def _kill(self) -> None:
        process, self._process, self._left = self._process, None, None
        if process is None:
            return
        process.kill()
        process.close()
        await process.wait()

    def __repr__(self) -> str:
        return f"<TemplateRenderer {'not started' if self._process is None else f'process {self._process.pid}'}>"


async def _exchange(process: PipedProcess, asked: RenderRequest) -> RenderAnswer:
    await process.write(msgspec.json.encode(asked) + b"\n")
    return await _answer(process, asked.id)


async def _answer(process: PipedProcess, id: int) -> RenderAnswer:
    while True:
        line = await process.stdout.readline()
        if not line:
            raise EOFError
        answer = msgspec.json.decode(line, type=RenderAnswer)
        if answer.id == id:
            return answer
