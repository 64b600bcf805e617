"""Signs and verifies desired documents, with Ed25519 signatures over their canonical bytes.

    {"v":1, "doc":{…}, "sigs":[{"kid":"32 hex digits","sig":"base64"}, …]}

The signatures are detached: they are over the very bytes of `doc` as they are sent, after a domain, so that no
signature made here means anything elsewhere. The broker in between can delay or lose a document, never write one. A
device pins public keys (a line each, `ed25519 BASE64 words`, as in the list of attestation keys) and believes a
document with at least one good signature of theirs; signatures of keys that it does not know are skipped.

Rotation: a document with `keys` replaces the pinned ones. It must be signed by an old key (so it comes from a trusted
signer) and by each new one (so no signer names a key that it does not hold); a device that was away meanwhile is given
the same document again, since it is retained. Where several rotations may be missed, or more than one key shall be
needed, there is the chain of roots (`root_chain.py`); once a device follows it, documents hand nothing over.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta, field

from tidegate.fleet.messages import BadMessage
from tidegate.rollout.desired import DesiredDocument, Revision, decode_desired, encode_desired
from tidegate.rollout.root_chain import MAX_LINKS, RootLink
from tidegate.security.attestation.software import key_id

MAX_SIGNED_BYTES: Final = 106_496
_DOMAIN: Final = b"tidegate desired document, 1\0"
Keys = Mapping[str, bytes]  # public keys by their id (`key_id`)


class SignatureRefused(ValueError):
    """A document without a signature of a trusted key; the text says why."""


class DocumentSignature(msgspec.Struct, frozen=True):
    kid: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    signature: bytes = field(name="sig")  # base64 in JSON


class SignedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document as it travels, with the chain of roots (`root_chain.py`), which has signatures of its own."""

    document: msgspec.Raw = field(name="doc")
    signatures: Annotated[tuple[DocumentSignature, ...], Meta(max_length=16)] = field(name="sigs")
    v: Literal[1] = field(default_factory=lambda: 1)
    roots: Annotated[tuple[RootLink, ...], Meta(max_length=MAX_LINKS)] = ()


class _ClaimedDocument(msgspec.Struct, frozen=True):
    revision: Revision = field(name="rev")


class _ClaimedMessage(msgspec.Struct, frozen=True):
    document: _ClaimedDocument = field(name="doc")


_decoder: Final = msgspec.json.Decoder(SignedDocument)
_claims: Final = msgspec.json.Decoder(_ClaimedMessage)


def sign_document(desired: DesiredDocument, keys: Sequence[Ed25519PrivateKey], roots: Sequence[RootLink] = ()) -> bytes:
    """The message for a topic `…/desired`, signed by each of the keys, with the chain that leads to them."""
    raw = encode_desired(desired)
    signatures = tuple(DocumentSignature(id_of(key), key.sign(_DOMAIN + raw)) for key in keys)
    return msgspec.json.encode(SignedDocument(msgspec.Raw(raw), signatures, roots=tuple(roots)))


def id_of(key: Ed25519PrivateKey) -> str:
    """The `kid` of a private key."""
    return key_id(key.public_key().public_bytes_raw())


def roots_in(message: bytes) -> tuple[RootLink, ...]:
    """The chain of roots that came with a document, unchecked. Raises BadMessage."""
    return _decoded(message).roots


def verify_document(message: bytes, trusted: Keys, threshold: int = 1) -> tuple[DesiredDocument, bytes]:
    """The document and its canonical bytes.

    Args:
        threshold: how many of the trusted keys must have signed it.

    Raises:
        SignatureRefused: no trusted key has signed it, or a rotation lacks a signature.
        BadMessage: it is signed, or could not be looked at, but is no document that this agent can read.
    """
    raw, signatures = _taken_apart(message)
    good = sum(_is_signed(raw, signatures, public) for public in trusted.values())
    if not good:
        raise SignatureRefused(_refusal(signatures, trusted))
    if good < threshold:
        raise SignatureRefused(f"it is signed by {good} of the trusted keys, and the root asks for {threshold}")
    desired = decode_desired(raw)
    for text in desired.keys:
        public = base64.b64decode(text)
        if not _is_signed(raw, signatures, public):
            raise SignatureRefused(f"it names the new key {key_id(public)}, which has not signed it")
    return desired, raw


def read_unverified(message: bytes) -> DesiredDocument:
    """The document in a message, without a check of its signatures: for code that only carries documents.

    Raises:
        BadMessage: it is no message with a document.
    """
    return decode_desired(_taken_apart(message)[0])


def claimed_revision(message: bytes) -> int:
    """The revision that a message says it has, whoever wrote it and whatever else is wrong with it; 0 for none.

    It names the message in a refusal, so that the sender of this one knows it; nothing else may rest upon it.
    """
    try:
        return _claims.decode(message).document.revision
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return 0


def keys_after(desired: DesiredDocument, trusted: Keys) -> Keys:
    """The keys to trust after this document was accepted."""
    new = [base64.b64decode(text) for text in desired.keys]
    return {key_id(public): public for public in new} if new else trusted


def public_text(public: bytes) -> str:
    """A public key as `DesiredDocument.keys` spells it."""
    return base64.b64encode(public).decode()


def _taken_apart(message: bytes) -> tuple[bytes, Mapping[str, bytes]]:
    parts = _decoded(message)
    return bytes(parts.document), {one.kid: one.signature for one in parts.signatures}


def _decoded(message: bytes) -> SignedDocument:
    if len(message) > MAX_SIGNED_BYTES:
        raise BadMessage(f"{len(message)} bytes, at most {MAX_SIGNED_BYTES} are allowed")
    try:
        return _decoder.decode(message)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise BadMessage(str(error)) from error


def _is_signed(raw: bytes, signatures: Mapping[str, bytes], public: bytes) -> bool:
    signature = signatures.get(key_id(public))
    if signature is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _DOMAIN + raw)
    except (InvalidSignature, ValueError):
        return False
    return True


def _refusal(signatures: Mapping[str, bytes], trusted: Keys) -> str:
    if not trusted:
        return "this device trusts no key"
    if known := sorted(set(signatures) & set(trusted)):
        return f"the signature of the key {known[0]} is wrong"
    return f"it is signed by {', '.join(sorted(signatures)) or 'nobody'}, and none of these keys is trusted here"
