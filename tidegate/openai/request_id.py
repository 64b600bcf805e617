"""The id of a request where OpenAI's SDKs look for it: `_request_id` of an answer, `request_id` of an error.

A stream's headers leave with its first token, before there is an id; its last event says it (`tidegate-request-id`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidegate.oip.reply import REQUEST_ID_KEY

OPENAI_KEY: Final = "x-request-id"


def with_request_id(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers of an answer or an error, with its id under OpenAI's name as well, if it has one."""
    found = headers.get(REQUEST_ID_KEY)
    return headers if found is None else {**headers, OPENAI_KEY: found}
