"""Suggestions name what a mistyped word was probably meant to be, of commands and of names alike."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import click


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'a' or 'b'?" with the names that are like the word; "" if none is."""
    close = get_close_matches(word, list(known))
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


class SuggestingGroup(click.Group):
    """A group that answers a mistyped command with the ones that are like it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not (hint := did_you_mean(args[0], self.list_commands(ctx))):
                raise
            raise click.UsageError(error.message + hint, ctx) from error
