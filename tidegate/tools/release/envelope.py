"""The envelope holds a release's statement with Ed25519 signatures over it, in the form that in-toto's tools read.

The keys are those that sign rollouts (`tidegate keys signing create`), by the same ids. What is signed begins with
`DSSEv1` and names the payload's type and both lengths, so no signature over a release passes for one over a rollout
or a root (`tidegate/rollout`), whose bytes begin otherwise, or the other way round. The payload is signed as the bytes
that it is: no reader has to write JSON again as the signer did.

Source: secure-systems-lab, "DSSE: Dead Simple Signing Envelope", version 1, section "Signature Definition".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta, field

from tidegate.rollout.signing import Keys, id_of
from tidegate.tools.release.checksums import ENVELOPE, ReleaseRefused

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_MOST_SIGNATURES: Final = 16


class EnvelopeSignature(msgspec.Struct, frozen=True):
    keyid: Annotated[str, Meta(pattern=r"^[A-Za-z0-9:._+/=-]{0,200}\Z")]  # shown, so nothing that a terminal acts on
    signature: bytes = field(name="sig")  # base64 in JSON


class ReleaseEnvelope(msgspec.Struct, frozen=True, rename="camel"):
    """A line of JSON; `payload` is the statement, in base64."""

    payload_type: str
    payload: bytes
    signatures: Annotated[tuple[EnvelopeSignature, ...], Meta(max_length=_MOST_SIGNATURES)] = ()


_decoder: Final = msgspec.json.Decoder(ReleaseEnvelope)


def signed(payload: bytes, key: Ed25519PrivateKey, others: Sequence[EnvelopeSignature] = ()) -> bytes:
    """The content of the envelope's file: the statement with this key's signature beside those of others.

    Raises:
        ReleaseRefused: there are more signatures than an envelope holds.
    """
    own = EnvelopeSignature(id_of(key), key.sign(_pre_authenticated(PAYLOAD_TYPE, payload)))
    kept = tuple(one for one in others if one.keyid != own.keyid)
    if len(kept) >= _MOST_SIGNATURES:
        raise ReleaseRefused(f"{ENVELOPE}: it has {len(kept)} signatures already, and holds {_MOST_SIGNATURES}")
    return msgspec.json.encode(ReleaseEnvelope(PAYLOAD_TYPE, payload, (*kept, own))) + b"\n"


def read_envelope(raw: bytes) -> ReleaseEnvelope:
    """An envelope before any check of its signatures. Raises ReleaseRefused: it is none, or holds no statement."""
    try:
        envelope = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ReleaseRefused(f"{ENVELOPE}: no signed statement: {error}") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise ReleaseRefused(f"{ENVELOPE}: it holds {envelope.payload_type!r} and no {PAYLOAD_TYPE}")
    return envelope


def signers(envelope: ReleaseEnvelope, trusted: Keys) -> list[str]:
    """The ids of the trusted keys that have signed it, of which there is one at least.

    Raises:
        ReleaseRefused: none has.
    """
    message = _pre_authenticated(envelope.payload_type, envelope.payload)
    by_id = {one.keyid: one.signature for one in envelope.signatures}
    good = [kid for kid, public in trusted.items() if kid in by_id and _is_good(public, by_id[kid], message)]
    if not good:
        raise ReleaseRefused(f"{ENVELOPE}: {_refusal(by_id.keys() & trusted.keys(), sorted(by_id))}")
    return sorted(good)


def _refusal(known: set[str], there: Sequence[str]) -> str:
    if known:
        return f"the signature of the key {min(known)} is wrong: the statement was changed after it was signed"
    whose = ", ".join(there) or "no key"
    return f"it is signed by {whose}, and none of these is among the keys that --key names"


def _pre_authenticated(payload_type: str, payload: bytes) -> bytes:
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _is_good(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
