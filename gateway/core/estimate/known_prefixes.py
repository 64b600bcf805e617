"""Known prefixes are what a target has computed of prompts: so many tokens of the next one it need not compute again.

Most prompts begin as others did: with the same instructions, or with the conversation so far. An engine that keeps the
attention of earlier prompts computes only what is new, so a target that has seen the beginning answers sooner. That is
a difference in predicted time and nothing else: no weight, and no target is preferred for its own sake.

A prompt is known by the hashes of its blocks, each of which stands for all tokens up to its end (`prefix_chain`), under
the tenant's name. So nothing of a prompt is kept, and one tenant's prompts say nothing about another's.

What a target still has can only be guessed: its cache has a size and other users. Its answers say how many tokens of
their prompts it had (`cached_tokens`), and the guess is held to that: of what is known only the share counts that has
lately turned out to be there. It is 0 until an answer shows otherwise, and stays 0 for an engine that keeps nothing, or
does not say.

    expected tokens = known leading blocks × BLOCK × found / (expected + PRIOR)

It can be wrong where a prompt is under way that another with the same beginning is placed after: it is known once its
first token is there. What other gateways' prompts have left there is not known at all.

Pure; mutable and bounded: the blocks that were used least recently are forgotten first. Source: Kwon et al., "Efficient
Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, of blocks that are shared by hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

BLOCK: Final = 16  # tokens; engines share pages of 16 to 32
MOST_BLOCKS: Final = 4096  # of one target's variant: 65,536 tokens, in half a megabyte
UNPROVEN_BLOCKS: Final = 256  # of one that was never seen to have any of them
LONGEST_CHAIN: Final = 512  # blocks of one prompt that are looked at
_PRIOR_TOKENS: Final = 64.0  # that count as expected in vain from the beginning
_MEMORY_TOKENS: Final = 4096.0  # of expectations, that count: a change of the target's cache is seen within these
_ID_BYTES: Final = 4

PrefixChain = tuple[int, ...]


def prefix_chain(ids: bytes, salt: str) -> PrefixChain:
    """The hashes of a prompt's blocks, each of all tokens up to its end.

    Args:
        ids: token ids as INT32, as they travel.
        salt: prompts under different salts have no block in common: the tenant's name, with the model's version.
    """
    step, so_far, found = BLOCK * _ID_BYTES, hash(salt), []
    for start in range(0, min(len(ids) - step + 1, LONGEST_CHAIN * step), step):
        so_far = hash((so_far, ids[start : start + step]))
        found.append(so_far)
    return tuple(found)


class KnownPrefixes:
    """What one variant on one target has computed of prompts, as far as is known here."""

    __slots__ = ("_blocks", "_expected", "_found", "_most")

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._expected = self._found = 0.0  # tokens, of late

    @property
    def share(self) -> float:
        """Of what was expected lately, the share that was there: from 0 to 1."""
        return self._found / (self._expected + _PRIOR_TOKENS)

    def known_tokens(self, chain: Sequence[int]) -> int:
        """The tokens at the beginning of a prompt that it has computed before and may still have."""
        blocks, count = self._blocks, 0
        for block in chain:
            if block not in blocks:
                break
            count += 1
        return count * BLOCK

    def expected_tokens(self, chain: Sequence[int]) -> float:
        """The tokens at the beginning of a prompt that it need not compute, on average."""
        if not self._found:
            return 0.0
        return self.known_tokens(chain) * self.share

    def computed(self, chain: Sequence[int], cached_tokens: int) -> None:
        """A prompt has been computed there, `cached_tokens` of it from its cache, as its answer says."""
        known = self.known_tokens(chain)
        if known:
            kept = 1.0 - min(1.0, known / _MEMORY_TOKENS)
            self._expected = kept * self._expected + known
            self._found = kept * self._found + min(max(0, cached_tokens), known)
        for block in chain:  # the newest last, and an answer's whole prompt is in the cache now
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > (self._most if self._found else min(self._most, UNPROVEN_BLOCKS)):
            self._blocks.popitem(last=False)

    def __repr__(self) -> str:
        return f"<KnownPrefixes {len(self._blocks)} blocks, {self.share:.0%} of what is expected is there>"
