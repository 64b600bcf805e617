"""Each `tidegate …` that pages, files of `deploy/`, help texts and messages show is a command with such options.

Examples are cut at pipes and comments and given to the command's own parser; nothing is run. Words that stand for
something (`NAME`, `…`) are taken as they are.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache

import click
import pytest

from tests.contract.pages import cli_reference, reference
from tests.contract.pages.text import CHANGELOG, Piece, blocks, deployed, inline_code, pages, read
from tests.contract.surface.declared import COMMANDS, loaded
from tests.contract.surface.record import recorded
from tests.lint.tree import sources
from tidegate.cli import cli

pytestmark = pytest.mark.slow
# Before the program's name: a prompt, a privilege, variables, a folder.
PROGRAM = re.compile(r"^(?:[$#] )?(?:sudo |exec |ExecStart=)?(?:[A-Z_]+=\S* )*(?:\S*/)?tidegate (?P<words>.*)$")
# Three blanks part a command from what is said of it.
ENDS = re.compile(r"(?:^|\s)(?:\||>|>>|<|&&|\|\||;|&|#|2>).*$|;.*$| {3,}.*$")
QUOTED = re.compile(r"`((?:[A-Z_]+=\S+ )*tidegate [^`]+)`")


def shown() -> Iterator[Piece]:
    for page in [*pages(), CHANGELOG]:
        yield from (code for code in inline_code(page) if PROGRAM.match(code.text))
    for page in pages():
        for block in blocks(page):
            yield from lines(block)
    for path in deployed(""):
        yield from lines(Piece(path, 1, re.sub(r"(?m)^# +", "", read(path))))
    for source in sources():
        if source.is_product:
            yield from spoken(source.path, source.tree)


def lines(block: Piece) -> Iterator[Piece]:
    """The command lines of a text, those that go on behind a backslash as one."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    for line in joined.splitlines():
        if PROGRAM.match(line.strip()):
            yield Piece(block.page, block.line, line.strip())


def spoken(path: str, tree: ast.Module) -> Iterator[Piece]:
    """Commands within backticks in strings of the code, and the examples of help texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        else:
            continue
        for found in QUOTED.findall(" ".join(text.split())):
            yield Piece(path, node.lineno, found)
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            if re.match(r"(?:[\w ]+: +| +)tidegate \w", line):  # "Example:  tidegate …", or further ones under it
                yield Piece(path, node.lineno, line[line.index("tidegate ") :])


def problem(text: str) -> str:
    """Why it is no command line of the program; "" if it is one."""
    found = PROGRAM.match(text)
    assert found is not None
    line = ENDS.sub("", found["words"]).rstrip(".,:…) ")
    try:
        words = shlex.split(line)
    except ValueError:
        return "is not closed where a shell reads it"
    command, context = root()
    while True:
        if any(word in ("--help", "-h") for word in words):
            return ""
        try:
            given, left, _ = command.make_parser(context).parse_args(list(words))
        except click.BadOptionUsage as error:  # named in prose, without its value: `tidegate simulate --replay`
            return "" if words[-1] == error.option_name else error.format_message()
        except click.UsageError as error:
            return f"{context.command_path}: {error.format_message()}"
        if not isinstance(command, click.Group):
            return f"too many words: {left}" if left else choices(command, given)
        if not left or stands_for_something(left[0]):
            return ""
        inner = command.get_command(context, left[0])
        if inner is None:
            return f"{context.command_path} has no command {left[0]!r}"
        command, context, words = inner, click.Context(inner, parent=context, info_name=left[0]), left[1:]


def choices(command: click.Command, given: dict[str, object]) -> str:
    for one in command.params:
        values = given.get(one.name or "")
        if isinstance(one.type, click.Choice):
            for value in values if isinstance(values, list | tuple) else [values]:
                if isinstance(value, str) and not stands_for_something(value) and value not in one.type.choices:
                    return f"{max(one.opts, key=len)} takes {', '.join(map(str, one.type.choices))}, not {value!r}"
    return ""


def stands_for_something(word: str) -> bool:
    return re.fullmatch(r"[A-Z][A-Z_]*|X|<.*>|\[.*|\{.*|.*…", word) is not None


@cache
def root() -> tuple[click.Command, click.Context]:
    """The program, with the commands of this checkout."""
    program = click.Group(commands=loaded(COMMANDS), params=list(cli.params))
    return program, click.Context(program, info_name="tidegate")


def test_every_command_that_is_shown_exists_with_its_options() -> None:
    found = list(shown())
    wrong = [f"{one.place}: `{one.text}`: {why}" for one in found if (why := problem(one.text))]
    assert not wrong, "\n".join(wrong)
    assert len({one.page for one in found}) > 100, "examples of pages, deploy/ and the code are read"


def test_the_reference_has_every_command_with_its_options_as_help_tells_them() -> None:
    written = read(cli_reference.PAGE)
    assert written == cli_reference.page(), f"commands have changed; write the page anew: {reference.COMMAND}"
    assert len(re.findall(r"(?m)^## tidegate ", written)) > 70
    assert "| `--config FILE` |" in written.partition("\n## tidegate gateway\n")[2].partition("\n## ")[0]


def test_every_option_that_prose_names_exists() -> None:
    """Of any command: prose often leaves the command out. Those of benches and of containers are another's."""
    known = {name for line in [*recorded("cli"), *recorded("pytest_plugin")] for name in re.findall(r"--[a-z-]+", line)}
    others = {"--rows", "--first-seed", "--shm-size", "--help", "--strict", "--quick", "--record", "--set", "--store"}
    others.add("--save")  # of redis-server
    others |= {"--block", "--num-cpus"}  # of `ray start`
    named = {
        (code.place, option)
        for page in pages()
        for code in inline_code(page)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code.text)
    }
    assert len(named) > 60
    assert {one for one in named if one[1] not in known | others} == set()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("tidegate up --edges 3", ""),
        ("tidegate upp --edges 3", "has no command 'upp'"),
        ("$ /opt/tidegate/bin/tidegate up --edgs 3", "No such option"),
        ("tidegate config schema edge > edge.json", ""),
        ("tidegate config schema edge pool", "too many words"),
        ("tidegate broker config --for emqx", "takes mosquitto"),
        ("tidegate model statuss", "has no command 'statuss'"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_found(line: str, why: str) -> None:
    assert problem(line) == "" if not why else why in problem(line)
