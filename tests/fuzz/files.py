"""Targets that are files: manifests of models, key files, an issuer's keys, and the credentials that callers show."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import jwt
import yaml
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import strategies as st
from jwt.algorithms import OKPAlgorithm
from msgspec.structs import replace
from structlog.testing import capture_logs

from gateway.config.auth import JwtConfig
from gateway.core.access.api_key import KeyVerifier
from gateway.core.admission.tenants import TenantQuotas
from gateway.identity.credential import UnprovedCredential
from gateway.identity.jwks import JwksError, keys_of
from gateway.identity.jwt_tokens import TokenVerifier
from gateway.identity.key_file import read_keys
from gateway.identity.keyring import KeyRing
from tests.fuzz.hostile import TEXTS, as_json, bent, damaged
from tests.fuzz.target import Target
from tests.support.gateway.guarded import Keys
from tests.support.serving.host import minilm
from tidegate import clock
from tidegate.caller import Grant, UsageLimits
from tidegate.config import ConfigError
from tidegate.models.manifest import Batching, Manifest, QueuePolicy
from tidegate.models.repository import RepositoryError, manifest_text, parse_manifest

NOWHERE = Path("model.yaml")


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


# Manifests

_POLICIES = Batching(
    default_queue_policy=QueuePolicy(max_queue_size=9),
    priority_queue_policy={
        1: QueuePolicy(),
        2: QueuePolicy(max_queue_size=3, timeout_action="DELAY", default_timeout_microseconds=5),
    },
)
_MANIFEST = manifest_text(replace(minilm(), batching=_POLICIES))
_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
_YAMLS = [_MANIFEST.encode(), _LAUGHS.encode(), b"name: x\nversion: 1\n", b"&a [*a]\n", b"axes: &a {b: *a}\n"]
_manifests = (
    damaged(_YAMLS)
    | bent(yaml.safe_load(_MANIFEST)).map(as_json)
    | bent(yaml.safe_load(_MANIFEST)).map(lambda one: yaml.dump(one).encode())
)


async def read_manifest(_: None, text: bytes) -> None:
    try:
        manifest = parse_manifest(text.decode(errors="replace"), NOWHERE)
    except RepositoryError as error:
        assert len(str(error)) < 64 * 1024, f"{len(str(error))} characters of error"
        return
    assert parse_manifest(manifest_text(manifest), NOWHERE) == manifest


async def good_manifest(_: None) -> None:
    assert isinstance(parse_manifest(_MANIFEST, NOWHERE), Manifest)


MANIFESTS = Target("manifests", _nothing, _manifests, read_manifest, good_manifest, weight=0.5)


# Files of API keys, and keys that are shown


class Ring:
    """A ring whose file is written anew for each throw."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keys(folder / "keys.json", {}, {})
        self.good = self.keys.add("good", Grant("acme", limits=UsageLimits(requests_per_s=5)))
        self.keys.add("late", Grant("acme", ("a*",), 2, "site", ("infer", "admin")), expires_in_s=100.0)
        self.text = self.keys.path.read_bytes()
        self.ring = KeyRing(self.keys.path)

    def write(self, text: bytes) -> None:
        self.keys.path.write_bytes(text)


@asynccontextmanager
async def _ring() -> AsyncIterator[Ring]:
    with tempfile.TemporaryDirectory() as folder, capture_logs():
        ring = Ring(Path(folder))
        ring.keys.path.chmod(0o600)
        async with ring.ring:
            yield ring


# Of a fixed key: examples must be the same in every run.
_KEY_FILE = {
    "format": 1,
    "keys": [
        {
            "id": "0123456789ab",
            "salt": "00" * 16,
            "secrets": [{"digest": "11" * 32, "until": 4e9}],
            "created_at": 1.0,
            "expires_at": 5e9,
            "grant": {"tenant": "acme", "models": ["a*"], "rights": ["infer"], "limits": {"requests_per_s": 5}},
            "note": "x",
        }
    ],
}
_SHOWN = "tg_0123456789ab_" + "ab" * 32
_key_files = damaged([as_json(_KEY_FILE)]) | bent(_KEY_FILE).map(as_json)
_shown = damaged([_SHOWN.encode()], most_bytes=4000).map(lambda text: text.decode(errors="replace")) | st.sampled_from(
    TEXTS
)


async def take_keys(held: Ring, thrown: tuple[bytes, str]) -> None:
    text, shown = thrown
    held.write(text)
    try:
        records = read_keys(held.keys.path)
    except ConfigError:
        records = ()
    held.ring.look()
    for one in records:
        lock = KeyVerifier(one)
        lock.opens(b"\x00" * 32, 0.0)
        TenantQuotas({}).of_identity(lock.identity).ask(1.0)
        if one.id == "0123456789ab":
            _tried(held, _SHOWN)
    _tried(held, shown)


def _tried(held: Ring, shown: str) -> None:
    try:
        held.ring.identify(shown, clock.utc_s())
    except UnprovedCredential as error:
        assert not shown or len(shown) < 60 or shown not in repr(error)


async def good_keys(held: Ring) -> None:
    held.write(held.text)
    held.ring.look()
    assert held.ring.identify(held.good, clock.utc_s()).tenant == "acme"


KEY_FILES = Target("key-files", _ring, st.tuples(_key_files, _shown | st.just(_SHOWN)), take_keys, good_keys)


# Tokens, and the keys that they are signed with

_SIGNER = ed25519.Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
_JWKS = {"keys": [{**json.loads(OKPAlgorithm.to_jwk(_SIGNER.public_key())), "kid": "k", "use": "sig", "alg": "EdDSA"}]}
_CLAIMS = {
    "iss": "https://idp",
    "aud": "tidegate",
    "sub": "ann",
    "tenant": "acme",
    "iat": 4e9,
    "exp": 4e9 + 600,
    "models": ["a*"],
    "nbf": 1.0,
}
_AT_S = 4e9 + 1


def _signed(claims: dict[str, Any], header: dict[str, Any] | None = None) -> bytes:
    return jwt.api_jws.encode(as_json(claims), _SIGNER, "EdDSA", {"kid": "k", **(header or {})}).encode()


_tokens = (
    damaged([_signed({**_CLAIMS, "iat": 1.0, "exp": 4e9})], most_bytes=10_000)
    | bent({**_CLAIMS, "iat": 1.0}).map(_signed)
    | bent(_CLAIMS).map(_signed)
    | st.dictionaries(
        st.sampled_from(("kid", "typ", "crit", "jku", "b64")), st.sampled_from(TEXTS[3:]), max_size=3
    ).map(lambda header: _signed(_CLAIMS, header))
)


@asynccontextmanager
async def _issuer() -> AsyncIterator[TokenVerifier]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "jwks.json"
        file.write_text(json.dumps(_JWKS))
        tokens = TokenVerifier(
            JwtConfig(issuer="https://idp", audience="tidegate", jwks_file=file, max_lifetime_s=1e10)
        )
        async with tokens.keys:
            yield tokens


async def take_token(tokens: TokenVerifier, thrown: tuple[bytes, bytes]) -> None:
    token, key_set = thrown
    try:
        await tokens.identify(token.decode(errors="replace"), _AT_S)
    except UnprovedCredential as error:
        assert len(repr(error)) < 2000
    with suppress(JwksError):
        keys_of(key_set)


async def good_token(tokens: TokenVerifier) -> None:
    now = clock.utc_s()
    claims = {**_CLAIMS, "iat": now - 5, "exp": now + 60, "nbf": 1}
    assert (await tokens.identify(_signed(claims).decode(), now)).tenant == "acme"


_key_sets = damaged([as_json(_JWKS)]) | bent(_JWKS).map(as_json)
TOKENS = Target("tokens", _issuer, st.tuples(_tokens, _key_sets), take_token, good_token)

TARGETS = (MANIFESTS, KEY_FILES, TOKENS)
