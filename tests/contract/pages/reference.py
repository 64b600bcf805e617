"""`docs/configuration-reference.md` is written from the configuration models, and a test holds it to them.

    python -m tests.contract.pages.reference          write it anew, after a key, a default or a description changed,
                                                      and with it docs/cli-reference.md (cli_reference.py)

A section that several processes have in common stands once, at the end; another one stands after its process's keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import PurePath
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from tests.contract.pages import cli_reference
from tests.contract.pages.keys import REQUIRED, ROLES, Key
from tests.contract.pages.keys import keys as keys_of
from tests.contract.pages.text import resolve

PAGE: Final = "docs/configuration-reference.md"
COMMAND: Final = "python -m tests.contract.pages.reference"
# What a process finds out on its machine.
FOUND_OUT: Final = {("edge", "name"): "the host name"}
_HEAD: Final = f"""\
# Every key of the configuration

For each process its keys, what they take, their defaults and what they do. What belongs together and why is in
[configuration.md](configuration.md). This page is written from the code (`{COMMAND}`). A file to
begin with is `tidegate config example ROLE`; for editors there is `tidegate config schema ROLE`.

A key of a section is written `SECTION.KEY` here, with `[]` for one of a list and `*` for a name that you give. In the
environment it is `TIDEGATE_ROLE_SECTION__KEY`, in capitals.
"""
_OF: Final = {"gateway": "`tidegate gateway`", "edge": "`tidegate edge`", "pool": "`tidegate pool`"}


def page() -> str:
    """The page as the models are now."""
    every = {role: keys_of(role) for role in ROLES}
    common = _common(every)
    parts = [_HEAD]
    for role in ROLES:
        parts.append(f"\n## {_OF[role]}\n\n{_table(role, [key for key in every[role] if not _is_within(key, common)])}")
    for section in common:
        at = {role: _prefix(every[role], section) for role in ROLES}
        who = ", ".join(f"{role}" for role in ROLES if at[role] is not None)
        role, prefix = next((role, prefix) for role, prefix in at.items() if prefix is not None)
        within = [key for key in every[role] if key.path.startswith(f"{prefix}.")]
        parts.append(f"\n## The section `{prefix}` ({who})\n\n{_table(role, within)}")
    return "".join(parts)


def _common(every: dict[str, list[Key]]) -> list[type[BaseModel]]:
    """The sections that more than one process has."""
    has: dict[type[BaseModel], set[str]] = {}
    for role, keys in every.items():
        for key in keys:
            if key.section is not None:
                has.setdefault(key.section, set()).add(role)
    return [section for section, roles in has.items() if len(roles) > 1]


def _is_within(key: Key, sections: list[type[BaseModel]]) -> bool:
    return key.model in sections


def _prefix(keys: list[Key], section: type[BaseModel]) -> str | None:
    return next((key.path for key in keys if key.section is section), None)


def _table(role: str, keys: list[Key]) -> str:
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        meaning = (key.field.description or "").replace("|", "\\|")
        lines.append(f"| `{key.path}` | {_takes(key)} | {default_text(role, key)} | {meaning} |")
    return "\n".join(lines) + "\n"


def default_text(role: str, key: Key) -> str:
    """As a user would write it."""
    if key.default is REQUIRED:
        return "required"
    if (role, key.path) in FOUND_OUT:
        return FOUND_OUT[role, key.path]
    if isinstance(key.default, BaseModel):
        return "its keys'"
    text = plain(key.default)
    return text if text == "none" and not isinstance(key.default, str) else f"`{text}`"


def plain(value: Any) -> str:
    """A value in the words of these pages: none, true, false, a number, a word, or a list."""
    value = to_jsonable_python(value) if not isinstance(value, PurePath) else str(value)
    match value:
        case None | [] | {} | ():
            return "none"
        case bool():
            return str(value).lower()
        case float() if value == int(value):
            return str(int(value))
        case list() | tuple():
            return f"[{', '.join(plain(one) for one in value)}]"
    return str(value)


def _takes(key: Key) -> str:
    schema = _schema(key.model)
    name = key.path.rpartition(".")[2].removesuffix("[]")
    return "; ".join(dict.fromkeys(_forms(schema["properties"][name], schema.get("$defs", {}))))


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _forms(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _forms(one, definitions)
        return
    if "enum" in schema or "const" in schema:
        yield ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
        return
    match schema.get("type"):
        case "array":
            yield "a list: " + "; ".join(_forms(schema.get("items", {}), definitions))
        case "object" if "additionalProperties" in schema and "properties" not in schema:
            yield "by name: " + "; ".join(_forms(schema["additionalProperties"], definitions))
        case "object":
            yield "a section"
        case "integer" | "number" as kind:
            yield ("an integer" if kind == "integer" else "a number") + _bounds(schema)
        case "boolean":
            yield "true or false"
        case "string":
            yield "a path" if schema.get("format") == "path" else "text"
        case "null":
            yield "null"


def _bounds(schema: dict[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    words = [
        f" from {plain(least)}" if least is not None else f" above {plain(above)}" if above is not None else "",
        f" to {plain(most)}" if most is not None else "",
    ]
    return "".join(words)


def main() -> None:
    for path, text in ((PAGE, page()), (cli_reference.PAGE, cli_reference.page())):
        resolve(path).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path} is written\n")


if __name__ == "__main__":
    main()
