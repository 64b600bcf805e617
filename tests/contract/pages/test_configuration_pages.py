"""What the pages say of configuration keys is what the models have: names, defaults, and whole sections of YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml
from pydantic import BaseModel

from tests.contract.pages import reference
from tests.contract.pages.keys import REQUIRED, ROLES, Key, models
from tests.contract.pages.keys import keys as keys_of
from tests.contract.pages.text import Piece, blocks, deployed, inline_code, pages, prose, read, resolve, rows
from tidegate.config import load
from tidegate.models.manifest import Manifest, Variant
from tidegate.netsim.proxy.scenario import LinkScenario
from tidegate.rollout.device_settings import checked, flattened
from tidegate.tools.config_findings import said_wrongly

KEYS: dict[str, list[Key]] = {role: keys_of(role) for role in ROLES}
# What may stand in brackets after a key and is meant as its default.
VALUE = re.compile(r"`([a-z][a-z0-9_.]*)` \((none|true|false|[\d.,]+(?: (?:s|ms|KiB|MiB|GiB|°C))?)\)")
CODE = re.compile(r"`([^`]+)`")
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "ms": 1e-3, "s": 1, "°C": 1}
# Whose keys a table has, by its first one, where no column says so: a process, and a section of it.
TABLES = {
    ("docs/configuration.md", "workers"): ("pool", ""),
    ("docs/configuration.md", "enabled"): ("pool", "recycling."),
    ("docs/configuration.md", "max_in_flight"): ("gateway", ""),
    ("docs/degradation.md", "target_attainment"): ("gateway", "scaling."),
    ("docs/edge-device.md", "threads"): ("edge", ""),
    ("docs/generating-models.md", "use"): ("pool", "vllm."),
    ("docs/offline.md", "store.max_bytes"): ("edge", ""),
    ("docs/security.md", "max_body_bytes"): ("gateway", "limits."),
}
FILES = {"gateway.yaml": "gateway", "edge.yaml": "edge", "pool.yaml": "pool"}
DEPLOYED = {"site": "gateway", "device": "edge", "cloud": "pool"}
TLS = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("TIDEGATE_")]:
        monkeypatch.delenv(key)


@pytest.mark.slow
def test_the_reference_has_every_key_of_the_models_with_its_default_and_no_other() -> None:
    assert read(reference.PAGE) == reference.page(), f"keys have changed; write the page anew: {reference.COMMAND}"


class Told(NamedTuple):
    """A key in a table, with its default if the table has a column for it."""

    place: str
    role: str
    path: str
    default: str | None


def told() -> Iterator[Told]:
    for page in (one for one in pages() if one != reference.PAGE):
        of: tuple[str, str] = ("", "")
        for head, cells, line in rows(page):
            if head[:2] == ("where", "key"):
                for role in ROLES if cells[0] == "all three" else cells[0].split(", "):
                    yield from (Told(line.place, role, name, None) for name in CODE.findall(cells[1]))
            elif "default" in head[1:3] and head[head.index("default") - 1].startswith("key"):
                at = head.index("default")
                names = CODE.findall(cells[at - 1])
                of = TABLES.get((page, names[0]), of)
                defaults = [re.sub(r" \(.*?\)|`", "", one) for one in cells[at].split(", ")]
                assert len(defaults) == len(names), f"{line.place}: a default for each of {names}"
                for name, default in zip(names, defaults, strict=True):
                    role = "edge" if name == "max_message_bytes" else of[0]
                    section = "" if name in ("max_body_bytes", "max_message_bytes") else of[1]
                    yield Told(line.place, role, section + name, default)


def test_every_key_in_a_table_exists_and_has_the_default_that_the_table_says() -> None:
    found = list(told())
    assert [
        f"{one.place}: {one.role} has no key {one.path}" for one in found if key_at(one.role, one.path) is None
    ] == []
    wrong = [
        f"{one.place}: {one.path} is not {one.default!r} but {reference.plain(key.default)}"
        for one in found
        if (key := key_at(one.role, one.path)) and one.default is not None and not same(one.default, key.default)
    ]
    assert not wrong, "\n".join(wrong)
    assert len(found) > 80


def key_at(role: str, path: str) -> Key | None:
    return next((key for key in KEYS.get(role, ()) if key.path == path), None)


def test_a_value_in_brackets_after_a_key_is_its_default() -> None:
    wrong, seen = [], 0
    for page in pages():
        text = "\n".join(one.text for one in prose(page))
        for name, value in VALUE.findall(text):
            known = [key for role in ROLES for key in KEYS[role] if f".{key.path}".endswith(f".{name}")]
            if known:
                seen += 1
                if not any(same(value, key.default) for key in known):
                    wrong.append(f"{page}: `{name}` ({value}): {[reference.plain(key.default) for key in known]}")
    assert not wrong, "\n".join(wrong)
    assert seen > 10


def same(text: str, default: Any) -> bool:
    if default is REQUIRED:
        return False
    number, _, unit = re.sub(r"(?<=\d) (?=\d)", "", text).partition(" ")
    if isinstance(default, int | float) and not isinstance(default, bool) and number[:1].isdigit():
        return float(number.replace(",", "")) * UNITS.get(unit, 1) == float(default)
    return text == ("its keys'" if isinstance(default, BaseModel) else reference.plain(default))


def yaml_blocks() -> list[Piece]:
    return [block for page in pages() for block in blocks(page, "yaml")]


def owner(block: Piece) -> list[str]:
    """The files that a block is a part of, which its first line names."""
    first = block.text.splitlines()[0]
    return re.findall(r"\b(\w+\.yaml)\b", first) if first.startswith("#") else []


@pytest.mark.parametrize("block", yaml_blocks(), ids=lambda block: block.place)
def test_every_yaml_on_a_page_is_read_by_what_it_is_for(block: Piece, tmp_path: Path) -> None:
    files = owner(block)
    assert files, f"{block.place}: begin it with a comment that names its file: # gateway.yaml, # model.yaml, …"
    values = yaml.safe_load(block.text)
    for name in files:
        if name == "model.yaml":
            check_manifest(Variant if "in a variant" in block.text else Manifest, values)
        elif name == "device.yaml":
            checked(flattened(values))
        elif name == "scenario.yaml":
            msgspec.convert(values, LinkScenario)
        else:
            own = {key: value for key, value in values.items() if key in models()[FILES[name]].model_fields}
            assert own and (own == values or len(files) > 1), f"{block.place}: {name} has not all of {list(values)}"
            check_configuration(FILES[name], own, tmp_path)


def check_manifest(kind: type[msgspec.Struct], values: dict[str, Any]) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, value in values.items():
        msgspec.convert(value, fields[key].type, str_keys=True)


def check_configuration(role: str, values: dict[str, Any], folder: Path) -> None:
    file = folder / f"{role}.yaml"
    file.write_text(yaml.safe_dump({**beside(role, values), **values}))
    assert said_wrongly(load(models()[role], file)) == []


def beside(role: str, values: dict[str, Any]) -> dict[str, Any]:
    """What a section needs from the rest of its file, so that a part of one can be read as a whole."""
    found: dict[str, Any] = {} if role == "pool" else {"mqtt": "mqtts://broker"}
    if "attestation" in values:
        found["tls"] = TLS
    if "mtls" in values.get("auth", {}):
        found["tls"] = {**TLS, "client_ca": "callers.crt"}
    return found


def test_the_table_of_a_manifest_has_every_key_of_it() -> None:
    page = "docs/configuration.md"
    told = {name for head, cells, _ in rows(page) if head == ("key", "meaning") for name in CODE.findall(cells[0])}
    assert told == {field.encode_name for field in msgspec.structs.fields(Manifest)}


def test_every_file_in_deploy_config_names_only_keys_that_its_process_has() -> None:
    files = deployed(".yaml")
    configs = [path for path in files if path.startswith("deploy/config/")]
    assert {Path(path).stem for path in configs} == DEPLOYED.keys()
    for path in configs:
        assert said_wrongly(load(models()[DEPLOYED[Path(path).stem]], resolve(path))) == []


def environment(text: str) -> Iterator[tuple[str, str]]:
    for role, name in re.findall(r"\bTIDEGATE_(GATEWAY|EDGE|POOL)_([A-Z][A-Z0-9_]*[A-Z0-9])\b", text):
        yield role.lower(), name.lower()


@pytest.mark.slow
def test_every_variable_of_the_environment_on_a_page_is_a_key() -> None:
    wrong, seen = [], 0
    for path in [*pages(), *deployed("")]:
        for role, name in environment(read(path)):
            seen += 1
            if name not in ("key", "name") and key_at(role, name.replace("__", ".")) is None:
                wrong.append(f"{path}: TIDEGATE_{role.upper()}_{name.upper()}")
    assert not wrong, wrong
    assert seen > 3


@pytest.mark.slow
def test_a_key_with_a_dot_in_backticks_exists() -> None:
    """`artifacts.max_partials`, `tls.client_ca`: the first word is a section of a process's configuration."""
    sections = {
        key.path.partition(".")[0].removesuffix("[]") for role in ROLES for key in KEYS[role] if "." in key.path
    }
    known = {key.path for role in ROLES for key in KEYS[role]}
    wrong, seen = [], 0
    for page in pages():
        for code in inline_code(page):
            word = code.text.partition(":")[0]
            if re.fullmatch(r"[a-z_]+(\[\])?(\.[a-z_0-9]+(\[\])?)+", word) and re.split(r"[.\[]", word)[0] in sections:
                if word.endswith((".py", ".md", ".yaml", ".json", ".txt", ".jsonl", ".key", ".crt", ".digests")):
                    continue
                seen += 1
                if word not in known and word.replace(".", ".*.", 1) not in known:
                    wrong.append(f"{code.place}: {word}")
    assert not wrong, "\n".join(wrong)
    assert seen > 15
