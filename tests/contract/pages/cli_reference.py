"""`docs/cli-reference.md` is written from the commands themselves, and a test holds it to them.

What a command says of itself under `--help` stands there as it is; hidden commands and options, and those that every
command has, are left out. `python -m tests.contract.pages.reference` writes it anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from typing import Final

import click

from tests.contract.surface.declared import COMMANDS, loaded

PAGE: Final = "docs/cli-reference.md"
_HEAD: Final = """\
# Every command

Each command of `tidegate` with its arguments and options, as `--help` tells them. This page is written from the code
(`python -m tests.contract.pages.reference`). `-h` and `--help` work after each command; an error that a user can cause
is one message and exit code 1, and a command line that is wrong has exit code 2. Words in capitals stand for values.
"""


def page() -> str:
    """The page as the commands are now."""
    every = list(_every())
    listed = [f"- [`{path}`](#{path.replace(' ', '-')}): {_first(command)}" for path, command in every]
    return "\n".join([_HEAD, *listed, "", *(_section(path, command) for path, command in every)])


def _every() -> Iterator[tuple[str, click.Command]]:
    for name, command in sorted(loaded(COMMANDS).items()):
        yield from _under(f"tidegate {name}", command)


def _under(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if command.hidden:
        return
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _under(f"{path} {name}", child)


def _first(command: click.Command) -> str:
    """Its first sentence."""
    paragraph = " ".join(cleandoc(command.help or "").partition("\n\n")[0].split())
    return _plain(re.split(r"(?<=\.)\s", paragraph)[0])


def _section(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [f"## {path}", f"```\nUsage: {usage}\n```", *_help(command.help), *_help(command.epilog)]
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    if rows := [row for one in options if (row := _row(one, context))]:
        parts.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _help(text: str | None) -> Iterator[str]:
    """The paragraphs of a help text; those that click leaves as they are become code."""
    for paragraph in filter(None, cleandoc(text or "").split("\n\n")):
        if paragraph.startswith("\b\n"):
            yield "```\n" + paragraph.removeprefix("\b\n") + "\n```"
        else:
            yield _plain(" ".join(paragraph.split()))


def _row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{one}`" for one in [*option.opts, *option.secondary_opts])
    if not option.is_flag and not option.count:
        names = names.removesuffix("`") + f" {option.make_metavar(context)}`"
    said = option.get_help_extra(context)
    default = f"`{said['default']}`" if "default" in said else "required" if option.required else ""
    meaning = " ".join((option.help or "").split()) + (" May be given several times." if option.multiple else "")
    return f"| {_cell(names)} | {_cell(default)} | {_cell(_plain(meaning)).strip()} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _plain(text: str) -> str:
    """Prose that a renderer would else take for marks."""
    cut = re.split(r"(`[^`]*`)", text)
    return "".join(one if one.startswith("`") else re.sub(r"([*_<\[])", r"\\\1", one) for one in cut)
