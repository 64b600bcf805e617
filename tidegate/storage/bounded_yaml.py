"""A YAML document that another program writes is composed within bounds, so that none can stop its reader.

Three kinds of small documents are expensive: deep ones end the interpreter's stack, aliases of aliases stand for
millions of values ("billion laughs"), and a list of a million scalars takes a minute. All three show in the events of
the parser, which needs neither a stack nor memory for them, so they are counted there before anything is composed.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

MOST_DEEP: Final = 32
MOST_NODES: Final = 131_072  # with each alias counted as what it stands for
Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


class TooMuch(ValueError):
    """The document is too deep or too large; the text says which."""


def compose(text: str, *, most_nodes: int = MOST_NODES) -> yaml.Node | None:
    """The document's root node. Raises yaml.YAMLError and TooMuch."""
    _check(text, most_nodes)
    return yaml.compose(text, Loader=Loader)


def construct(node: yaml.Node) -> Any:
    """Plain values of a composed document. Raises yaml.YAMLError."""
    return yaml.SafeLoader("").construct_document(node)


def _check(text: str, most_nodes: int) -> None:
    sizes: dict[str, int] = {}  # by anchor: how many nodes it stands for
    open_: list[tuple[str | None, int]] = []  # anchor, and the count before it
    count = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise TooMuch(f"line {_line(event)}: the alias *{event.anchor} is of itself or of nothing")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if len(open_) > MOST_DEEP:
            raise TooMuch(f"line {_line(event)}: it is more than {MOST_DEEP} levels deep")
        if count > most_nodes:
            raise TooMuch(f"line {_line(event)}: it has more than {most_nodes} values, as aliases count")


def _line(event: yaml.Event) -> int:
    return int(event.start_mark.line) + 1 if event.start_mark is not None else 1
