"""Keeps what transformers' cache has of prompts apart by salt: only prompts with the same one share pages.

A prompt that begins as an earlier one is not computed from its beginning, and its answer says how much of it was there
(`cached_tokens`). Shared by everybody, that would tell a caller how far its guess at another's prompt is right, page by
page. transformers knows a page by a hash of all tokens up to its end, and has no salt, so it is shown other tokens for
that: of a salted prompt the first eight are replaced by a digest of them and the salt, 256 bits, that no prompt can
spell. Nothing but the hash is made of them. Without a salt they stay as they are.

It can be wrong where transformers looks at these tokens for anything else: its version is pinned. Source: vLLM's
`cache_salt`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any, Final

_REPLACED: Final = 8  # tokens; a page has more
_DIGEST_BYTES: Final = 32


class SaltedPrefixes:
    """Of one cache. `begin` each sequence by its name before transformers has it, and `end` it.

    Args:
        cache: transformers' `PagedAttentionCache`, two of whose methods are replaced.
    """

    def __init__(self, cache: Any) -> None:
        self._salts: dict[str, str] = {}
        cache.search_prefix_match = partial(self._found, cache.search_prefix_match)
        for allocator in cache.cache_allocators.values():
            allocator.mark_complete_blocks = partial(self._marked, allocator.mark_complete_blocks)

    def begin(self, name: str, salt: str) -> None:
        self._salts[name] = salt

    def end(self, name: str) -> None:
        self._salts.pop(name, None)

    def _found(self, search: Callable[[str, list[int]], int], name: str, prompt: list[int]) -> int:
        return search(name, self._shown(name, prompt))

    def _marked(self, mark: Callable[[str, list[int], int], None], name: str, ids: list[int], complete: int) -> None:
        mark(name, self._shown(name, ids), complete)

    def _shown(self, name: str, ids: list[int]) -> list[int]:
        salt = self._salts.get(name, name)  # one that is not known here shares with nobody
        return salted_ids(ids, salt) if salt else ids

    def __repr__(self) -> str:
        return f"<SaltedPrefixes of {len(self._salts)} sequences>"


def salted_ids(ids: list[int], salt: str) -> list[int]:
    """The tokens as they are hashed under a salt."""
    begun = array("i", ids[:_REPLACED]).tobytes()
    digest = blake2b(begun, key=blake2b(salt.encode()).digest(), digest_size=_DIGEST_BYTES).digest()
    return [*array("i", digest), *ids[_REPLACED:]]
