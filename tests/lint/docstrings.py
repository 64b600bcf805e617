"""The first sentence of a module's docstring is short, and speaks of things as things."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Final

from tests.lint.tree import Source, Violation

MOST_WORDS: Final = 25
PEOPLE: Final = re.compile(r"\b(who|whom|whose|whoever|nobody|somebody|he|him|his|those who)\b", re.IGNORECASE)


def riddles(sources: Iterable[Source]) -> list[Violation]:
    """Modules without a docstring, or whose first sentence is long or calls a thing a person."""
    found = []
    for source in sources:
        if not source.is_product:
            continue
        text = ast.get_docstring(source.tree)
        if not text:
            found.append(Violation(source.path, 1, "there is no docstring: what is this file for?"))
            continue
        first = first_sentence(text)
        if len(first.split()) > MOST_WORDS:
            found.append(Violation(source.path, 1, f"the first sentence has {len(first.split())} words"))
        if match := PEOPLE.search(first):
            found.append(Violation(source.path, 1, f"the first sentence says {match[0]!r} of a thing"))
    return found


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence, or the first empty line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.:!?])\s", paragraph)[0]
