"""Text of others on an operator's terminal: no markup of ours, and no characters that a terminal would obey."""

from __future__ import annotations

from rich.markup import escape


def plain(text: object) -> str:
    """The text as it is to be read, for what takes rich's markup. Tabs and line ends become spaces, the rest a mark."""
    words = str(text)
    if not words.isprintable():
        words = "".join(
            [one if one.isprintable() else " " if one.isspace() else "\N{REPLACEMENT CHARACTER}" for one in words]
        )
    return escape(words)
