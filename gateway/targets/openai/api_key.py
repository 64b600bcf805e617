"""The key for a server: from a file that is followed, or from an environment variable that is read once.

It is in memory here and in the header of each request, and nowhere else: not in a `repr`, a log, an error, a recording
or a report. What a server says in an error has it blotted out, since some repeat it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, Self

from tidegate.config import ConfigError
from tidegate.runtime.followed_file import FollowedFile

_FIT: Final = re.compile(r"[!-~]{1,8192}")  # what a header may hold
_BLOT: Final = b"***"


class ApiKey:
    """`async with` reads it. Raises ConfigError at the start only, without the key in its words."""

    def __init__(self, *, file: Path | None = None, variable: str | None = None) -> None:
        self._file = None if file is None else FollowedFile(file, _read, self._take, what="the key for a server")
        self._variable = variable
        self._key = ""

    async def __aenter__(self) -> Self:
        if self._file is not None:
            self._key = await self._file.__aenter__()
        elif self._variable is not None:
            key = os.environ.get(self._variable)
            if key is None:
                raise ConfigError(f"environment variable {self._variable} (key 'openai.api_key_env') is not set")
            self._key = _checked(key, f"environment variable {self._variable}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._file is not None:
            await self._file.__aexit__()

    def headers(self) -> dict[str, str]:
        """The header by which the server knows this gateway."""
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def blotted(self, words: bytes) -> bytes:
        """What a server said, without the key."""
        return words.replace(self._key.encode(), _BLOT) if self._key else words

    def blotted_text(self, words: str) -> str:
        """The same of a text. It has to be whole: of a key at which it was cut, the beginning would stay."""
        return words.replace(self._key, _BLOT.decode()) if self._key else words

    def _take(self, key: str) -> None:
        self._key = key

    def __repr__(self) -> str:
        return f"<ApiKey {'set' if self._key else 'none'}>"


def _read(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"cannot read {path} (key 'openai.api_key_file'): {reason}") from None
    return _checked(text, str(path))


def _found(text: str) -> str:
    return f"its {len(text)} characters are not one" if text else "it is empty"


def _checked(text: str, where: str) -> str:
    key = text.strip()
    if not _FIT.fullmatch(key):
        raise ConfigError(f"{where} has no key: one word of printable ASCII is wanted, and {_found(key)}")
    return key
