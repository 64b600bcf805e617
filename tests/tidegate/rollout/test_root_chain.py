"""A device walks the chain of roots link by link, and follows no link that is forged, skipped or older."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.signing_keys import signing
from tidegate.rollout.root_chain import (
    MAX_LINKS,
    RootKeys,
    RootLink,
    RootRefused,
    TrustedRoot,
    link_of,
    read_chain,
    walk,
)
from tidegate.rollout.signing import id_of, public_text
from tidegate.security.attestation.keys import make_key

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32) for seed in range(1, 7)]
STRANGER = Ed25519PrivateKey.from_private_bytes(b"\xff" * 32)


def public(keys: list[Ed25519PrivateKey]) -> dict[str, bytes]:
    return {id_of(key): key.public_key().public_bytes_raw() for key in keys}


def root(version: int, keys: list[Ed25519PrivateKey], threshold: int = 1) -> RootKeys:
    return RootKeys(version, threshold, tuple(public_text(one) for one in public(keys).values()))


holders = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique_by=id_of).flatmap(
    lambda keys: st.tuples(st.just(keys), st.integers(1, len(keys)))
)
histories = st.lists(holders, min_size=2, max_size=6)
History = list[tuple[list[Ed25519PrivateKey], int]]


def chain_of(history: History) -> list[RootLink]:
    """Version 1 is the first entry; its threshold is 1, as pinned keys' is."""
    links = []
    for number, (keys, threshold) in enumerate(history[1:], start=2):
        links.append(link_of(root(number, keys, threshold), [*history[number - 2][0], *keys]))
    return links


@pytest.mark.slow
@given(histories, st.data())
def test_a_device_that_missed_any_number_of_versions_comes_along(history: History, data: st.DataObject) -> None:
    chain, start = chain_of(history), TrustedRoot(public(history[0][0]))
    away_from = data.draw(st.integers(0, len(chain)))
    there = walk(start, chain[:away_from])
    last, threshold = history[-1]
    wanted = TrustedRoot(public(last), len(history), threshold)
    assert walk(there, chain) == walk(there, chain[away_from:]) == walk(start, chain) == wanted
    assert walk(wanted, chain[:-1]) == wanted, "what was walked past changes nothing"


@pytest.mark.slow
@given(histories, st.data())
def test_no_link_is_skipped(history: History, data: st.DataObject) -> None:
    chain = chain_of([*history, history[0]])
    gone = data.draw(st.integers(0, len(chain) - 2))
    with pytest.raises(RootRefused, match="does not follow"):
        walk(TrustedRoot(public(history[0][0])), [*chain[:gone], *chain[gone + 1 :]])


@pytest.mark.slow
@given(histories, st.data())
def test_a_link_that_lacks_a_signature_of_the_old_or_the_new_is_refused(history: History, data: st.DataObject) -> None:
    chain = chain_of(history)
    at = data.draw(st.integers(0, len(chain) - 1))
    keys, threshold = history[at + 1]
    before, needed = (history[at][0], history[at][1] if at else 1)
    signers = data.draw(st.lists(st.sampled_from([*KEYS, STRANGER]), unique_by=id_of))
    signed = set(map(id_of, signers))
    enough = len(signed & set(public(before))) >= needed and len(signed & set(public(keys))) >= threshold
    forged = [*chain[:at], link_of(root(at + 2, keys, threshold), signers)]
    start = TrustedRoot(public(history[0][0]))
    if enough:
        assert walk(start, forged).version == at + 2
    else:
        with pytest.raises(RootRefused, match="is signed by"):
            walk(start, forged)


@pytest.mark.slow
@given(histories)
def test_a_key_that_was_rotated_away_brings_back_nothing(history: History) -> None:
    newest = walk(TrustedRoot(public(history[0][0])), [*chain_of(history), handover(history, [STRANGER])])
    leaked = [*KEYS, Ed25519PrivateKey.from_private_bytes(b"\xfe" * 32)]
    assert walk(newest, [link_of(root(number, leaked), leaked) for number in range(2, newest.version + 1)]) == newest
    with pytest.raises(RootRefused, match="is signed by 0"):
        walk(newest, [link_of(root(newest.version + 1, leaked), leaked)])


def handover(history: History, to: list[Ed25519PrivateKey]) -> RootLink:
    return link_of(root(len(history) + 1, to), [*history[-1][0], *to])


def test_a_changed_link_and_one_key_twice_are_refused() -> None:
    link = link_of(root(2, KEYS[:2], 2), KEYS[:2])
    bent = RootLink(type(link.root)(bytes(link.root).replace(b'"threshold":2', b'"threshold":1')), link.signatures)
    start = TrustedRoot(public(KEYS[:1]))
    assert walk(start, [link]).threshold == 2
    with pytest.raises(RootRefused, match="signed by 0"):
        walk(start, [bent])
    with pytest.raises(ValueError, match="twice"):
        RootKeys(2, 1, (public_text(KEYS[0].public_key().public_bytes_raw()),) * 2)
    with pytest.raises(RootRefused, match="at most"):
        walk(start, [link] * (MAX_LINKS + 1))


def test_the_command_writes_a_chain_that_devices_walk(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.key" for name in "abc"]
    keys, chain = [make_key(path) for path in paths], tmp_path / "roots.json"

    def run(*words: str | Path) -> str:
        done = CliRunner().invoke(signing, ["rotate", str(chain), *map(str, words)])
        return "" if done.exit_code == 0 else done.output

    assert not run("--key", paths[0], "--to", paths[1], "--to", paths[2], "--threshold", "2")
    assert "signed by 1 of the keys of version 2, not by 2" in run("--key", paths[1], "--to", paths[0])
    assert not run("--key", paths[1], "--key", paths[2], "--to", paths[2])
    found = walk(TrustedRoot(public(keys[:1])), read_chain(chain))
    assert found == TrustedRoot(public(keys[2:]), 3, 1)
