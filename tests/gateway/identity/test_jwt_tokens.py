"""Tokens of an issuer: signature, audience, times and algorithm are checked; its keys may change or be unreachable."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from pydantic import ValidationError
from structlog.testing import capture_logs

from gateway.config.auth import JwtConfig
from gateway.identity import jwks
from gateway.identity.credential import UnprovedCredential
from gateway.identity.jwks import JwksError, KeySet, keys_of
from gateway.identity.jwt_tokens import TokenVerifier
from tidegate.config import ConfigError

NOW = 1_900_000_000.0
RSA = rsa.generate_private_key(65537, 2048)
WEAK = rsa.generate_private_key(65537, 1024)
EC, ED = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
SIGNERS: dict[str, Any] = {"RS256": RSA, "ES256": EC, "EdDSA": ED}
PUBLIC = [
    {**json.loads(RSAAlgorithm.to_jwk(RSA.public_key())), "kid": "RS256", "use": "sig"},
    {**json.loads(ECAlgorithm.to_jwk(EC.public_key())), "kid": "ES256"},
    {**json.loads(OKPAlgorithm.to_jwk(ED.public_key())), "kid": "EdDSA"},
]


@pytest.fixture(autouse=True)
def _it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    import datetime as real

    class Then(real.datetime):
        @classmethod
        def now(cls, tz: real.tzinfo | None = None) -> real.datetime:  # type: ignore[override]
            return real.datetime.fromtimestamp(NOW, tz)

    monkeypatch.setattr("jwt.api_jwt.datetime", Then)


def token(alg: str = "RS256", *, key: Any = None, headers: dict[str, Any] | None = None, **claims: Any) -> str:
    said = {"iss": "https://idp", "aud": "tidegate", "sub": "ann", "tenant": "acme", "iat": NOW, "exp": NOW + 600}
    said = {name: value for name, value in {**said, **claims}.items() if value is not None}
    header = {name: value for name, value in {"kid": alg, **(headers or {})}.items() if value is not None}
    return jwt.encode(said, key or SIGNERS[alg], alg, header)


def config(folder: Path, **more: Any) -> JwtConfig:
    file = folder / "jwks.json"
    file.write_text(json.dumps({"keys": PUBLIC}))
    return JwtConfig(issuer="https://idp", audience="tidegate", **{"jwks_file": file, **more})


async def refusal(tokens: TokenVerifier, text: str, now: float = NOW) -> str:
    with pytest.raises(UnprovedCredential) as refused:
        await tokens.identify(text, now)
    assert text not in repr(refused.value)
    return refused.value.reason


@pytest.fixture
async def tokens(tmp_path: Path) -> AsyncIterator[TokenVerifier]:
    found = TokenVerifier(config(tmp_path, rights=("infer", "metrics"), highest_priority=2, pin="site"))
    async with found.keys:
        yield found


@pytest.mark.parametrize("alg", SIGNERS)
async def test_a_valid_token_gives_an_identity(tokens: TokenVerifier, alg: str) -> None:
    who = await tokens.identify(token(alg, models=["mini*"]), NOW)
    assert (who.id, who.tenant, who.expires_at) == ("token:ann", "acme", NOW + 600)
    assert (who.grant.models, who.grant.rights, who.grant.highest_priority, who.grant.pin) == (
        ("mini*",), ("infer", "metrics"), 2, "site",
    )  # fmt: skip
    assert (await tokens.identify(token(alg), NOW)).grant.models == ("*",)


def _none_signed(**claims: Any) -> str:
    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none', 'kid': 'RS256'})}.{part(claims)}."


FORGED: dict[str, tuple[Any, str]] = {
    "another's key": (lambda: token(key=rsa.generate_private_key(65537, 2048)), "wrong"),
    "none": (lambda: _none_signed(iss="https://idp", aud="tidegate", tenant="acme", iat=NOW, exp=NOW + 1), "algorithm"),
    "the public key as a secret": (
        lambda: jwt.encode({"tenant": "acme", "exp": NOW + 1}, b"x" * 64, "HS256", {"kid": "RS256"}),
        "algorithm",
    ),
    "an algorithm that is not the key's": (lambda: token("ES256", headers={"kid": "RS256"}), "wrong"),
    "an unknown key": (lambda: token(headers={"kid": "other"}), "wrong"),
    "a kid that is no text": (lambda: _with_header(kid=["RS256"]), "malformed"),
    "keys of its own": (
        lambda: token(headers={"kid": "mine", "jku": "http://[::1]:1/", "jwk": PUBLIC[0]}),
        "wrong",
    ),
    "a demand that nobody knows": (lambda: token(headers={"crit": ["b64"], "b64": True}), "malformed|algorithm"),
    "another issuer": (lambda: token(iss="https://evil"), "wrong"),
    "another audience": (lambda: token(aud="elsewhere"), "wrong"),
    "no audience": (lambda: token(aud=None), "wrong"),
    "no end": (lambda: token(exp=None), "wrong"),
    "an end that is no number": (lambda: token(exp="never"), "wrong"),
    "not yet": (lambda: token(nbf=NOW + 31), "wrong"),
    "from the future": (lambda: token(iat=NOW + 31, exp=NOW + 60), "wrong"),
    "over": (lambda: token(exp=NOW - 31), "expired"),
    "for ever": (lambda: token(exp=NOW + 90_000), "lifetime"),
    "times that are texts": (lambda: token(iat=str(int(NOW))), "lifetime"),
    "no tenant": (lambda: token(tenant=None), "tenant"),
    "a tenant that is no name": (lambda: token(tenant="a#key:1"), "tenant"),
    "models that are no list": (lambda: token(models="*"), "models"),
    "models that are no names": (lambda: token(models=[1]), "models"),
    "nonsense": (lambda: "a.b.c", "malformed"),
    "no token": (lambda: "hello", "malformed"),
    "letters of no alphabet": (lambda: "é.é.é", "malformed"),
    "a book": (lambda: "a" * 8193, "malformed"),
}


def _with_header(**header: Any) -> str:
    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'RS256', **header})}.{part({'tenant': 'acme'})}.AAAA"


@pytest.mark.parametrize("kind", FORGED)
async def test_any_other_token_is_refused(tokens: TokenVerifier, kind: str) -> None:
    make, reason = FORGED[kind]
    assert await refusal(tokens, make()) in reason.split("|")


async def test_clocks_may_differ_by_the_leeway(tokens: TokenVerifier) -> None:
    assert (await tokens.identify(token(exp=NOW - 29, iat=NOW - 60), NOW)).tenant == "acme"
    assert (await tokens.identify(token(nbf=NOW + 29), NOW)).tenant == "acme"


async def test_a_token_that_was_good_is_remembered_until_it_expires(tokens: TokenVerifier) -> None:
    text = token(exp=NOW + 60)
    first = await tokens.identify(text, NOW)
    assert await tokens.identify(text, NOW + 89) is first
    assert await refusal(tokens, text, NOW + 90) == "expired"
    tokens.forget()
    assert repr(tokens).startswith("<TokenVerifier of https://idp 0 remembered")


async def test_no_more_tokens_are_remembered_than_there_is_room_for(
    tokens: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.identity.jwt_tokens.REMEMBERED", 2)
    for sub in "abc":
        await tokens.identify(token("EdDSA", sub=sub), NOW)
    assert "2 remembered" in repr(tokens)


# The issuer's keys


class Issuer:
    """Serves a key set, or whatever else a test wants to see handled."""

    def __init__(self) -> None:
        self.body = json.dumps({"keys": PUBLIC[:1]}).encode()
        self.status = 200
        self.headers: dict[str, str] = {}
        self.asked = 0
        self.reached = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        self.reached.set()
        await self.answers.wait()
        return web.Response(body=self.body, status=self.status, headers=self.headers)

    def rotate(self) -> None:
        """Offer new keys; from here on an answer waits until `answers` is set."""
        self.body = json.dumps({"keys": PUBLIC}).encode()
        self.reached.clear()
        self.answers.clear()


@pytest.fixture
async def issuer() -> AsyncIterator[tuple[Issuer, str]]:
    one, app = Issuer(), web.Application()
    app.router.add_get("/jwks", one.answer)
    async with TestServer(app) as server:
        yield one, str(server.make_url("/jwks"))


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    at = {"s": 1000.0}
    monkeypatch.setattr("gateway.identity.jwks.clock.now", lambda: at["s"])
    return at


async def test_an_unknown_key_is_fetched_but_not_more_often_than_every_so_often(
    issuer: tuple[Issuer, str], minutes: dict[str, float]
) -> None:
    one, url = issuer
    async with KeySet(url=url) as keys:
        assert (await keys.key("RS256"), one.asked) != (None, 0)
        one.body = json.dumps({"keys": PUBLIC}).encode()
        assert [await keys.key("ES256") for _ in range(50)] == [None] * 50
        assert one.asked == 1

        minutes["s"] += jwks.AGAIN_AFTER_S
        assert await keys.key("ES256") is not None
        assert one.asked == 2
        assert repr(keys) == f"<KeySet {url} 3 keys>"


async def test_a_caller_that_leaves_does_not_abort_the_fetch_that_others_wait_for(
    issuer: tuple[Issuer, str], minutes: dict[str, float]
) -> None:
    one, url = issuer
    async with KeySet(url=url) as keys:
        one.rotate()
        minutes["s"] += jwks.AGAIN_AFTER_S
        leaves = asyncio.create_task(keys.key("nobody's"))
        await one.reached.wait()
        stay = [asyncio.create_task(keys.key("ES256")) for _ in range(20)]
        leaves.cancel()
        await asyncio.wait([leaves])
        assert leaves.cancelled()
        one.answers.set()
        assert None not in await asyncio.gather(*stay)
        assert one.asked == 2, "once when it was entered, and once for all callers"


async def test_a_fetch_whose_only_caller_leaves_goes_on(issuer: tuple[Issuer, str], minutes: dict[str, float]) -> None:
    one, url = issuer
    async with KeySet(url=url) as keys:
        one.rotate()
        minutes["s"] += jwks.AGAIN_AFTER_S
        leaves = asyncio.create_task(keys.key("nobody's"))
        await one.reached.wait()
        leaves.cancel()
        await asyncio.wait([leaves])
        one.answers.set()
        assert await keys.key("ES256") is not None
        assert [await keys.key("nobody's"), one.asked] == [None, 2], "the pace holds"


async def test_closing_ends_a_fetch_that_is_under_way_and_no_other_begins(
    issuer: tuple[Issuer, str], minutes: dict[str, float]
) -> None:
    one, url = issuer
    with capture_logs() as logs:
        async with KeySet(url=url) as keys:
            one.rotate()
            minutes["s"] += jwks.AGAIN_AFTER_S
            leaves = asyncio.create_task(keys.key("ES256"))
            await one.reached.wait()
            leaves.cancel()
            await asyncio.wait([leaves])
            assert FETCH in {task.get_name() for task in asyncio.all_tasks()}
        assert FETCH not in {task.get_name() for task in asyncio.all_tasks()}
        minutes["s"] += jwks.AGAIN_AFTER_S
        assert await keys.key("ES256") is None
    assert (one.asked, logs) == (2, [])
    one.answers.set()


FETCH = "fetch of the issuer's keys"


class Rounds:
    """Stands in for `clock.sleep`: the refresh sleeps until a test lets it go on."""

    def __init__(self) -> None:
        self._asleep, self._wake = asyncio.Event(), asyncio.Event()

    async def sleep(self, _: float) -> None:
        self._asleep.set()
        await self._wake.wait()
        self._wake.clear()

    async def next(self) -> None:
        """Let the refresh do one round; returns when it sleeps again."""
        async with asyncio.timeout(1.0):
            await self._asleep.wait()
            self._asleep.clear()
            self._wake.set()
            await self._asleep.wait()


async def test_a_defect_in_one_refresh_does_not_end_the_next(
    issuer: tuple[Issuer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, url = issuer
    rounds, read = Rounds(), keys_of
    monkeypatch.setattr("gateway.identity.jwks.clock.sleep", rounds.sleep)

    def broken(_: bytes) -> Any:
        raise RuntimeError("a defect")

    async with KeySet(url=url) as keys:
        one.body = json.dumps({"keys": PUBLIC}).encode()
        monkeypatch.setattr(jwks, "keys_of", broken)
        with capture_logs() as logs:
            await rounds.next()
        assert [(entry["log_level"], entry.get("exc_info")) for entry in logs] == [("error", True)]
        assert await keys.key("RS256") is not None, "the known keys stay"

        monkeypatch.setattr(jwks, "keys_of", read)
        await rounds.next()
        assert await keys.key("ES256") is not None
        assert one.asked == 3


BROKEN = {
    "an error": {"status": 500},
    "elsewhere": {"status": 302, "headers": {"Location": "http://127.0.0.1:1/"}},
    "no JSON": {"body": b"<html>"},
    "no keys": {"body": b'{"keys": []}'},
    "too deep": {"body": b"[" * 100_000},
    "too large": {"body": b" " * (jwks.MOST_BYTES + 1)},
    "too many": {"body": json.dumps({"keys": [{}] * 65}).encode()},
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_while_the_issuer_is_away_its_old_keys_stay(
    issuer: tuple[Issuer, str], minutes: dict[str, float], kind: str
) -> None:
    one, url = issuer
    whole = one.body
    async with KeySet(url=url) as keys:
        for name, value in BROKEN[kind].items():
            setattr(one, name, value)
        with capture_logs() as logs:
            for _ in range(2):
                minutes["s"] += jwks.AGAIN_AFTER_S
                assert await keys.key("ES256") is None
        assert await keys.key("RS256") is not None
        assert [entry["log_level"] for entry in logs] == ["error"], "once, however often it is tried"
        assert repr(keys).endswith("away>")

        one.body, one.status = whole, 200
        minutes["s"] += jwks.AGAIN_AFTER_S
        assert await keys.key("ES256") is None
        assert repr(keys).endswith("1 keys>")


async def test_a_gateway_starts_also_where_the_issuer_cannot_be_reached() -> None:
    async with KeySet(url="http://127.0.0.1:1/jwks") as keys:
        assert await keys.key("RS256") is None


async def test_a_token_of_a_key_that_the_issuer_withdrew_is_forgotten(
    issuer: tuple[Issuer, str], minutes: dict[str, float], tmp_path: Path
) -> None:
    one, url = issuer
    tokens = TokenVerifier(config(tmp_path, jwks_file=None, jwks_url=url))
    async with tokens.keys:
        text = token()
        await tokens.identify(text, NOW)
        one.body = json.dumps({"keys": PUBLIC[1:]}).encode()
        minutes["s"] += jwks.AGAIN_AFTER_S
        await tokens.identify(token("ES256"), NOW)
        assert await refusal(tokens, text) == "wrong"


async def test_bytes_that_are_no_text_are_no_token(tmp_path: Path) -> None:
    tokens = TokenVerifier(config(tmp_path))
    for bytes_of in (b"a\xff.b.c", "ü.b.c".encode()):  # as aiohttp and grpc give the bytes of a header
        assert await refusal(tokens, bytes_of.decode("utf-8", "surrogateescape")) == "malformed"


async def test_a_file_of_keys_is_followed_and_a_broken_one_leaves_them(tmp_path: Path) -> None:
    tokens = TokenVerifier(config(tmp_path))
    file = tmp_path / "jwks.json"
    async with tokens.keys as keys:
        text = token()
        await tokens.identify(text, NOW)
        file.write_text("{")
        with capture_logs() as logs:
            keys.look()
            keys.look()
        assert [entry["event"] for entry in logs] == ["the issuer's keys stay as they were"]
        assert (await tokens.identify(token(sub="bob"), NOW)).tenant == "acme"

        file.write_text(json.dumps({"keys": PUBLIC[1:]}))
        keys.look()
        assert await refusal(tokens, text) == "wrong"


def test_of_a_key_set_only_strong_public_keys_for_signatures_are_taken() -> None:
    weak = {**json.loads(RSAAlgorithm.to_jwk(WEAK.public_key())), "kid": "weak"}
    other = {**json.loads(ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP384R1()).public_key())), "kid": "p384"}
    listed = [weak, other, {"kty": "oct", "k": "AAAA", "kid": "oct"}, {**PUBLIC[0], "use": "enc"}, {"kty": "RSA"}, 7]
    with pytest.raises(JwksError, match="no key of it can be used"):
        keys_of(json.dumps({"keys": listed}).encode())
    assert list(keys_of(json.dumps({"keys": [*listed, PUBLIC[2]]}).encode())) == ["EdDSA"]


async def test_a_token_without_a_key_id_is_tried_with_the_only_key_there_is(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps({"keys": PUBLIC[:1]}))
    found = TokenVerifier(config(tmp_path, jwks_file=file))
    async with found.keys:
        assert (await found.identify(token(headers={"kid": None}), NOW)).tenant == "acme"


@pytest.mark.parametrize("text", [None, "{}"])
async def test_a_key_file_that_is_none_stops_the_start(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "jwks.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"auth\.jwt\.jwks_file"):
        async with KeySet(file=file):
            pass


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, "either jwks_file or jwks_url"),
        ({"jwks_url": "https://a/", "jwks_file": "x"}, "either jwks_file or jwks_url"),
        ({"jwks_url": "http://idp.example/"}, "https://"),
        ({"jwks_url": "file:///etc/passwd"}, "https://"),
        ({"jwks_url": "https://user:pass@idp/"}, "no user or password"),
        ({"jwks_url": "https://idp/", "algorithms": ["none"]}, "algorithms"),
        ({"jwks_url": "https://idp/", "algorithms": ["HS256"]}, "algorithms"),
        ({"jwks_url": "https://idp/", "algorithms": []}, "algorithms"),
    ],
)
def test_a_configuration_that_would_be_unsafe_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        JwtConfig(issuer="i", audience="a", **more)
