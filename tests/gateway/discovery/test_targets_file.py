"""A targets file that cannot be used names the file, the line, the key and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.discovery.targets_file import MOST_BYTES, read_targets
from tidegate import clock
from tidegate.config import ConfigError

GOOD = """
targets:
- {name: a, address: '10.0.0.1:8101', zone: site}
- {name: b, address: '10.0.0.2:8101', draining: true}
"""


def test_it_has_the_schema_of_the_gateways_own_list(tmp_path: Path) -> None:
    (path := tmp_path / "targets.yaml").write_text(GOOD)
    one, two = read_targets(path, has_tls=False)
    assert (one.spec.id, one.spec.address, one.spec.zone, one.draining) == ("pool/a", "10.0.0.1:8101", "site", False)
    assert (two.spec.id, two.draining) == ("pool/b", True)


def test_json_is_read_as_well(tmp_path: Path) -> None:
    (path := tmp_path / "targets.json").write_text('{"targets": [{"name": "a", "address": "h:1"}]}')
    assert [one.spec.id for one in read_targets(path, has_tls=False)] == ["pool/a"]


def test_an_empty_list_is_a_list(tmp_path: Path) -> None:
    (path := tmp_path / "targets.yaml").write_text("targets: []\n")
    assert read_targets(path, has_tls=False) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("targets:\n- name: a\n  addres: h:1\n", [":3: ", "'targets.0.addres'", "did you mean"]),
        ("targets:\n- name: a\n", [":2: ", "'targets.0.address' is missing"]),
        ("targets:\n- name: a\n  address: h:1\n  tier: palace\n", [":4: ", "'targets.0.tier'", "'palace'"]),
        ("targets:\n- [\n", [":3: ", "not valid YAML or JSON"]),
        ("", [":1: ", "'targets'"]),
        ("- a\n", [":1: ", "'targets'"]),
        ("targets:\n- {name: z, address: 'h:1'}\n- {name: a, address: 'h:1', tls: true}\n", [":3: ", "'a'", "tls"]),
        (
            "targets:\n- {name: a, address: 'http://h/v1', transport: openai, openai: {models: {m: m}}}\n",
            [":2: ", "'a'", "openai"],
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    (path := tmp_path / "targets.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_targets(path, has_tls=False)
    for word in [str(path), *words]:
        assert word in str(raised.value)


def test_a_file_is_bounded(tmp_path: Path) -> None:
    (path := tmp_path / "targets.yaml").write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(ConfigError, match="more than"):
        read_targets(path, has_tls=False)
    with pytest.raises(ConfigError, match="cannot read"):
        read_targets(tmp_path / "missing", has_tls=False)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("targets: " + "[" * 100_000, "more than 32 levels deep"),
        ("targets: " + "{a: " * 100_000, "more than 32 levels deep"),
        (LAUGHS + "targets: *h\n", "more than 131072 values"),
        (LAUGHS + "targets:\n- {name: a, address: 'h:1', models: *h}\n", "more than 131072 values"),
        ("targets:\n" + "- x\n" * 200_000, "more than 131072 values"),
        ("targets:\n" + "- x\n" * 10_000, "targets.0"),
        ("targets: &a [*a]\n", "alias \\*a is of itself"),
        ("targets: [*b]\n", "alias"),
        ("targets: !!python/object/apply:os.abort []\n", "could not determine a constructor"),
        ("? [a]\n: b\ntargets: []\n", "unhashable"),
        ("targets: 2024-99-99\n", "not valid YAML"),
        ("targets: \x00\n", "not valid YAML"),
        ("targets:\n- {name: \"a\\r\\nb: c\", address: 'h:1'}\n", "name that is not 1 to 64"),
    ],
)
def test_hostile_files_are_refused_soon_and_in_few_words(tmp_path: Path, text: str, words: str) -> None:
    (path := tmp_path / "targets.yaml").write_text(text)
    began_at = clock.now()
    with pytest.raises(ConfigError, match=words) as raised:
        read_targets(path, has_tls=False)
    assert len(str(raised.value)) < 4000
    assert clock.now() - began_at < 10.0  # each took minutes, or the interpreter's stack, or half a GB


def test_aliases_that_stay_small_may_be_used(tmp_path: Path) -> None:
    (path := tmp_path / "targets.yaml").write_text(
        "targets:\n- &one {name: a, address: 'h:1', zone: site}\n- {<<: *one, name: b}\n"
    )
    assert [(one.spec.id, one.spec.zone) for one in read_targets(path, has_tls=False)] == [
        ("pool/a", "site"),
        ("pool/b", "site"),
    ]


def test_a_pool_of_several_servers_is_a_target_for_each(tmp_path: Path) -> None:
    (path := tmp_path / "targets.yaml").write_text(
        "targets: [{name: a, address: 'h:8101', servers: 2, draining: true}]"
    )
    assert [(one.spec.id, one.spec.address, one.draining) for one in read_targets(path, has_tls=False)] == [
        ("pool/a-0", "h:8101", True),
        ("pool/a-1", "h:8102", True),
    ]


@pytest.mark.parametrize(("tls", "fits"), [("", False), (", tls: true", False), (", tls: false", True)])
def test_a_gateway_with_tls_calls_several_servers_in_plain_text_only_where_that_is_said(
    tmp_path: Path, tls: str, fits: bool
) -> None:
    (path := tmp_path / "targets.yaml").write_text(f"targets: [{{name: a, address: 'h:8101', servers: 2{tls}}}]")
    if fits:
        assert [one.spec.encrypted for one in read_targets(path, has_tls=True)] == [False, False]
        return
    with pytest.raises(ConfigError, match=r":1: target 'a' has servers, .* set tls: false"):
        read_targets(path, has_tls=True)
