"""What operators' commands ask of a running gateway's admin port, with the credential that the environment holds.

The key is no option of a command: options stand in process lists and in shell histories.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

import click

KEY_VARIABLE: Final = "TIDEGATE_API_KEY"
WITHIN_S: Final = 5.0
_REFUSED: Final = (401, 403)
_TOLD: Final = (400, 409)  # of which the body says what is wrong
_MOST_WORDS: Final = 500


class _StayHere(HTTPRedirectHandler):
    """A key is for the address that was named, wherever that one points."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def read_admin(admin: str, path: str) -> Any:
    """The JSON at `path` of the admin port; ends the command with exit code 1 and words where there is none."""
    with answer_of(admin, path) as response:
        return json.load(response)


@contextmanager
def answer_of(admin: str, path: str, *, silent_s: float = WITHIN_S) -> Iterator[IO[bytes]]:
    """The same as it comes, line by line; `silent_s` is how long nothing may come."""
    key = os.environ.get(KEY_VARIABLE)
    request = Request(admin.rstrip("/") + path, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with build_opener(_StayHere).open(request, timeout=silent_s) as response:
            yield response
            return
    except HTTPError as error:
        told = error.read(_MOST_WORDS).decode(errors="replace") if error.code in _TOLD else ""
        words = (
            f"put a key with the right `admin` into {KEY_VARIABLE}" if error.code in _REFUSED else told or error.reason
        )
        click.echo(f"the gateway at {admin} answers {error.code}: {words}", err=True)
    except (URLError, OSError, ValueError) as error:
        click.echo(f"no gateway answers at {admin}: {error}", err=True)
    sys.exit(1)
