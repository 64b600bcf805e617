"""A sequence's home is the target that has its state, signed, so that the client can carry it to any gateway.

A gateway remembers where it sent a sequence's first step, and another gateway does not. So the answer to each step has
a token in `tidegate-sequence-home`, and a client that comes to several gateways sends back the last one it got, as a
header or a parameter of that name. Every gateway with the same key then sends the step to that target:

    base64url(target, when the state is forgotten) . base64url(HMAC-SHA256 of these, the model and the sequence)

The name of the sequence is the tenant's own (`sequence_scope.py`), so a token is of no use to another tenant, nor for
another sequence or model. It tells its holder nothing that `tidegate-served-by` does not. A token is not a promise: a
target that has restarted has forgotten, and says so; one that is gone is named in the refusal.

Several keys may be given, to exchange one while gateways run: the first signs, each is believed.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from tidegate.oip.reply import HOME_KEY
from tidegate.outcome import InvalidRequest

KEY: Final = HOME_KEY
LEAST_KEY_BYTES: Final = 32
MAX_CHARACTERS: Final = 512
_MAC_BYTES: Final = 16
_PURPOSE: Final = b"tidegate sequence home 1"


class SequenceHomes:
    """Signs homes and reads them.

    Args:
        keys: of LEAST_KEY_BYTES at least, each; the first signs. Raises ValueError.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise ValueError("there is no key")
        if any(len(key) < LEAST_KEY_BYTES for key in keys):
            raise ValueError(f"a key has less than {LEAST_KEY_BYTES} bytes; `openssl rand -hex 32` makes one")
        self._keys = tuple(keys)

    def token(self, model: str, id: int | str, target: str, until_utc_s: float) -> str:
        """The home of a sequence, until its state is forgotten."""
        said = f"{int(until_utc_s)} {target}".encode()
        return f"{_text(said)}.{_text(_mac(self._keys[0], model, id, said))}"

    def target(self, token: str, model: str, id: int | str, utc_s: float) -> str | None:
        """The target that a token names; None of one whose time is over. Raises InvalidRequest."""
        said, mac = _parts(token)
        if not any(hmac.compare_digest(mac, _mac(key, model, id, said)) for key in self._keys):
            raise InvalidRequest(
                f"{KEY} was not signed for this sequence of {model} by a gateway of this fleet: send what the last "
                "answer of the sequence had, or begin it anew with sequence_start"
            )
        until_s, _, target = said.decode().partition(" ")
        return target if int(until_s) > utc_s else None

    def __repr__(self) -> str:
        return f"<SequenceHomes, {len(self._keys)} keys>"


def _mac(key: bytes, model: str, id: int | str, said: bytes) -> bytes:
    parts = (_PURPOSE, model.encode(errors="surrogatepass"), repr(id).encode(errors="surrogatepass"), said)
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, framed, sha256)[:_MAC_BYTES]


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")


def _parts(token: str) -> tuple[bytes, bytes]:
    said, dot, mac = token.partition(".")
    try:
        if not dot or len(token) > MAX_CHARACTERS:
            raise ValueError
        return tuple(urlsafe_b64decode(one.encode("ascii") + b"=" * (-len(one) % 4)) for one in (said, mac))  # type: ignore[return-value]
    except (ValueError, Error):
        raise InvalidRequest(f"{KEY} is no token that a gateway gives: {token[:80]!r}") from None
