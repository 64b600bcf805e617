"""Ends a text at the first of several stop strings, none of which is ever shown, not even its beginning.

A stop string may come in any number of pieces. Each is followed by the automaton of Knuth, Morris and Pratt, whose
state is how many of its characters the text ends with: that many characters are held back. A character costs the same
whatever the strings are.

Pure. Source: Knuth, Morris, Pratt, "Fast Pattern Matching in Strings", SIAM J. Comput. 1977.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Follows one text.

    Args:
        strings: none of them empty.
    """

    __slots__ = ("_firsts", "_held", "_states", "_strings", "_tables", "is_stopped")

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._tables = [_failure_table(one) for one in self._strings]
        self._states = [0] * len(self._strings)
        self._firsts = frozenset(one[0] for one in self._strings)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """What may be shown now. After a stop string nothing more may."""
        if self.is_stopped:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        whole = self._held + text
        for at in range(len(self._held), len(whole)):
            found = self._step(whole[at])
            if found:
                self.is_stopped, self._held = True, ""
                return whole[: at + 1 - found]
        kept = max(self._states)
        self._held = whole[len(whole) - kept :]
        return whole[: len(whole) - kept]

    def flush(self) -> str:
        """What was held back, at the end of a text in which no stop string came."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """The length of the longest stop string that ends here, or 0."""
        found = 0
        for index, (string, table) in enumerate(zip(self._strings, self._tables, strict=True)):
            state = self._states[index]
            while state and string[state] != character:
                state = table[state - 1]
            if string[state] == character:
                state += 1
            self._states[index] = state
            if state == len(string):
                found = max(found, state)
        return found

    def __repr__(self) -> str:
        return f"<StopStrings {len(self._strings)}, {len(self._held)} characters held back>"


def _failure_table(string: str) -> list[int]:
    """By length of a prefix, less one: the longest proper suffix of it that is a prefix as well."""
    table, length = [0] * len(string), 0
    for at in range(1, len(string)):
        while length and string[at] != string[length]:
            length = table[length - 1]
        if string[at] == string[length]:
            length += 1
        table[at] = length
    return table
