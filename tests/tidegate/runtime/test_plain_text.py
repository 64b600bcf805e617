"""Text of others on an operator's terminal."""

from __future__ import annotations

from rich.console import Console

from tidegate.runtime.plain_text import plain


def test_what_others_say_is_shown_as_it_is_and_obeyed_by_nobody() -> None:
    told = Console(width=200)
    with told.capture() as caught:
        told.print(plain("m[/x] [blink]hi[/] \x1b[2J\x07 a\r\nb \u202ereversed ünï"))
    assert caught.get() == "m[/x] [blink]hi[/] \ufffd[2J\ufffd a  b \ufffdreversed ünï\n"
