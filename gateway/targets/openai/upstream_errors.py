"""What a server's refusal means here: whose fault it is, and whether another target may do better.

    400, 422         the caller's, in the server's own words; too long a prompt is told from the rest
    401, 403         the operator's: the key. The caller is not at fault, and the target counts as broken
    404              the operator's: the name of the model there
    3xx              the operator's: the address. It is not followed, since the key would go along
    413              the caller's
    429, 529         load, with the wait that the server asks for; so is 503 with such a wait
    502, 503, 504    the way there
    other            the server's

An error may also come as an event of a stream that began well; it has a type or a code, and no status. Words of a
server are shortened, and are never those of a refused key, since some repeat the key in them. The key is blotted out of
the others before they are shortened: behind a cut in the middle of it, its beginning would not be known for one.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any, Final

import msgspec

from tidegate.generate.text.text_side import PromptTooLong
from tidegate.outcome import BadAnswer, InvalidRequest, NotSupported, Overloaded, ServeError, TooLarge, Unreachable

_MOST_WORDS: Final = 300
_LONGEST_WAIT_S: Final = 3600.0
_TOO_LONG: Final = re.compile(
    r"context.?length|context.?size|context window|max_model_len|maximum (?:model|allowed|input) length|"
    r"prompt is too long",
    re.IGNORECASE,
)
_OF_TYPE: Final[Mapping[str, int]] = {
    "invalid_request_error": 400, "BadRequestError": 400, "exceed_context_size_error": 400,
    "context_length_exceeded": 400, "authentication_error": 401, "invalid_api_key": 401, "permission_error": 403,
    "not_found_error": 404, "NotFoundError": 404, "model_not_found": 404, "rate_limit_error": 429,
    "rate_limit_exceeded": 429, "insufficient_quota": 429, "tokens": 429, "requests": 429, "overloaded_error": 529,
    "unavailable_error": 503, "not_supported_error": 501,
}  # fmt: skip


Blot = Callable[[str], str]


def error_of_answer(
    status: int, headers: Mapping[str, str], body: bytes, target: str, now_utc_s: float, blotted: Blot
) -> ServeError:
    """The error that a server answered with.

    Args:
        headers: by lower-case names.
        target: the id of the target, for the operator's words.
        blotted: a text without the key.
    """
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        said = body.decode(errors="replace")
    return _error(status, said, _wait_s(headers, now_utc_s), target, blotted)


def error_of_event(event: Mapping[str, Any], target: str, blotted: Blot) -> ServeError | None:
    """The error that an event of a stream says; None of any other event."""
    if event.get("object") == "error":
        said: Any = event
    elif (said := event.get("error")) is None:
        return None
    return _error(_status_in(said), said, None, target, blotted)


def _error(status: int, said: Any, wait_s: float | None, target: str, blotted: Blot) -> ServeError:
    words = _words(said, blotted)
    if 300 <= status < 400:
        return BadAnswer(f"{target} redirects elsewhere ({status}), which is not followed: set its address to that")
    match status:
        case 401 | 403:
            return refused_key(target, status)
        case 404:
            return BadAnswer(f"{target} does not know what it was asked for ({words}): check its openai.models")
        case 413:
            return TooLarge(f"{target} takes no request of this size: {words}")
        case 429 | 529:
            return Overloaded(f"{target} has no room: {words}", retry_after_s=wait_s)
        case 503 if wait_s is not None:
            return Overloaded(f"{target} has no room: {words}", retry_after_s=wait_s)
        case 502 | 503 | 504:
            return Unreachable(f"{target} cannot answer now ({status}): {words}")
        case 405 | 501:
            return NotSupported(f"{target} does not serve this: {words}")
        case 400 | 422:
            return (PromptTooLong if _is_too_long(said, words) else InvalidRequest)(words)
    return BadAnswer(f"{target} failed ({status}): {words}")


def refused_key(target: str, status: int) -> ServeError:
    """The refusal of this gateway's key."""
    return BadAnswer(
        f"{target} does not accept this gateway's key ({status}): its operator has to set openai.api_key_file or "
        "openai.api_key_env of the target"
    )


def _words(said: Any, blotted: Blot) -> str:
    """What a server says, in whichever of the usual places it says it."""
    inner = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner.get("type") or ""
    text = blotted(inner) if isinstance(inner, str) else ""
    printable = "".join([one if one.isprintable() else " " for one in text[: 4 * _MOST_WORDS]]).strip()
    return printable[:_MOST_WORDS] or "it gives no reason"


def _is_too_long(said: Any, words: str) -> bool:
    inner = said.get("error", said) if isinstance(said, dict) else {}
    kinds = [inner.get("code"), inner.get("type")] if isinstance(inner, dict) else []
    return any("context" in kind for kind in kinds if isinstance(kind, str)) or _TOO_LONG.search(words) is not None


def _status_in(said: Any) -> int:
    """The status that an error without one would have had."""
    if not isinstance(said, dict):
        return 500
    for kind in (said.get("code"), said.get("status_code"), said.get("type")):
        if isinstance(kind, int) and not isinstance(kind, bool) and 400 <= kind < 600:
            return kind
        if isinstance(kind, str) and kind in _OF_TYPE:
            return _OF_TYPE[kind]
    return 500


def _wait_s(headers: Mapping[str, str], now_utc_s: float) -> float | None:
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        if said := headers.get(name):
            try:
                wait_s = float(said) * unit_s
            except ValueError:
                wait_s = _until(said, now_utc_s)
            if isfinite(wait_s) and wait_s >= 0.0:
                return min(wait_s, _LONGEST_WAIT_S)
    return None


def _until(date: str, now_utc_s: float) -> float:
    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - now_utc_s)
    except (ValueError, TypeError, OverflowError):
        return -1.0
