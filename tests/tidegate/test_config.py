"""A configuration error names the file, the key, the value and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tidegate.config import ConfigError, ProcessConfig, Section, load, variables_of_no_key


class Nested(Section):
    retries: int = 3


class Example(ProcessConfig):
    model_config = SettingsConfigDict(env_prefix="TIDEGATE_EXAMPLE_")

    http_port: int = 8000
    name: str = "main"
    nested: Nested = Nested()
    named: dict[str, Nested] = Field(default_factory=dict)


def write(folder: Path, text: str) -> Path:
    path = folder / "example.yaml"
    path.write_text(text)
    return path


def test_defaults_hold_without_a_file() -> None:
    assert load(Example).http_port == 8000


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    assert load(Example, write(tmp_path, "# nothing yet\n")).name == "main"


def test_code_beats_the_environment_and_the_environment_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "http_port: 1\nname: file\nnested: {retries: 1}\n")
    monkeypatch.setenv("TIDEGATE_EXAMPLE_HTTP_PORT", "2")
    monkeypatch.setenv("TIDEGATE_EXAMPLE_NESTED__RETRIES", "9")
    config = load(Example, path, name="code")
    assert (config.http_port, config.name, config.nested.retries) == (2, "code", 9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http_prt: 1\n", "unknown key 'http_prt'; did you mean 'http_port'"),
        ("zzz: 1\n", "unknown key 'zzz'; known keys: http_port, name, named, nested"),
        ("http_port: many\n", "key 'http_port' = 'many'"),
        ("nested: {retries: x}\n", "key 'nested.retries' = 'x'"),
        ("- a list\n", "must be a mapping"),
        ("{unclosed: [\n", "not valid YAML"),
    ],
)
def test_an_error_names_the_key_and_the_value(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="(?s)" + words.replace("(", r"\(")) as caught:
        load(Example, path)
    assert str(path) in str(caught.value)


def test_a_bad_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_EXAMPLE_HTTP_PORT", "many")
    with pytest.raises(ConfigError, match="from the environment variable TIDEGATE_EXAMPLE_HTTP_PORT"):
        load(Example)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("# für Köln\n".encode("latin-1"), "byte 3 (0xfc) is no UTF-8"),
        (b"name: 2026-99-99\n", "is not valid YAML: month must be in 1..12"),
        (b"[" * 5000, "is not valid YAML"),
        (b"name: !!bool x\n", "is not valid YAML: a value that cannot be read as its tag says: 'x'"),
        (b'http_port: !!int ""\n', "is not valid YAML: a value that cannot be read as its tag says"),
        (b"name: !!timestamp x\n", "is not valid YAML: a value that cannot be read as its tag says"),
        (b"name: &a [*a]\n", "is not valid YAML: line 1: the alias *a is of itself or of nothing"),
        (b"name: one\nhttp_port: 1\nname: two\n", "the key 'name' is there twice, first in line 1"),
        (b"nested: {retries: 1, retries: 2}\n", "the key 'retries' is there twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, written: bytes, words: str) -> None:
    file = tmp_path / "site.yaml"
    file.write_bytes(written)
    with pytest.raises(ConfigError) as refused:
        load(Example, file)
    assert str(file) in str(refused.value) and words in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(Example, tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http_port: 'mqtt://u:s3cret@h:1'", "'mqtt://…@h:1'"),
        ("http_port: 'mqtt://u:s3cret@s3cret@h:1'", "'mqtt://…@h:1'"),
        ("http_port: ['u:s3cret@h']", "['…@h']"),
        ("http_port: {url: 'redis://:s3cret@h'}", "{'url': 'redis://…@h'}"),
        ("http_port: 'name@h:1'", "'name@h:1'"),
        ("name: mqtt://u:s3cret@h: 1", "mqtt://…@h"),  # no YAML
    ],
)
def test_no_error_shows_an_addresss_password(tmp_path: Path, text: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Example, write(tmp_path, text))
    assert shown in str(caught.value) and "s3cret" not in str(caught.value)


def test_a_few_lines_of_aliases_do_not_become_millions_of_values(tmp_path: Path) -> None:
    lines = ["nested:", f"  z0: &a0 [{', '.join('x' * 10)}]"]
    lines += [f"  z{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    with pytest.raises(ConfigError, match="more than 1000000 values, as aliases count"):
        load(Example, write(tmp_path, "\n".join(lines)))


def test_aliases_and_merges_give_what_they_stand_for(tmp_path: Path) -> None:
    config = load(Example, write(tmp_path, "named:\n  a: &a {retries: 1}\n  b: *a\n  c: {<<: *a, retries: 7}\n"))
    assert {name: one.retries for name, one in config.named.items()} == {"a": 1, "b": 1, "c": 7}


@pytest.mark.parametrize("variable", ["TIDEGATE_EXAMPLE_NAMED", "TIDEGATE_EXAMPLE_NESTED"])
def test_a_variable_that_is_no_json_is_named_without_its_value(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "{key: s3cret")
    with pytest.raises(ConfigError, match=f"the environment variable {variable} must be JSON") as refused:
        load(Example)
    assert "s3cret" not in str(refused.value)


def test_variables_of_no_key_are_named_but_for_what_kubernetes_says_of_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "TIDEGATE_EXAMPLE_HTPP_PORT": "1", "TIDEGATE_EXAMPLE_HTTP_PORT": "1", "TIDEGATE_EXAMPLE_NESTED__RETRIES": "1",
        "TIDEGATE_EXAMPLE_COLOUR": "red", "TIDEGATE_EXAMPLE_PORT": "tcp://10.0.0.1:80",
        "TIDEGATE_EXAMPLE_SERVICE_HOST": "10.0.0.1", "TIDEGATE_EXAMPLE_SERVICE_PORT_HTTP": "80",
        "TIDEGATE_EXAMPLE_PORT_80_TCP_ADDR": "10.0.0.1", "TIDEGATE_EXAMPLES_NAME": "another's",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert variables_of_no_key(Example) == [
        "the environment variable TIDEGATE_EXAMPLE_COLOUR is not read: there is no such key",
        "the environment variable TIDEGATE_EXAMPLE_HTPP_PORT is not read: there is no such key; "
        "did you mean TIDEGATE_EXAMPLE_HTTP_PORT?",
    ]
