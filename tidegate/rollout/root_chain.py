"""The chain of roots says which keys sign desired documents, and each link hands over from one version to the next.

    {"v":1, "root":{"version":3, "threshold":2, "keys":[…], "issued":1763775000}, "sigs":[…]}

Version 1 is what the operator's files pin: any one of their keys. Version n+1 is accepted by a device that is at
version n, and by no other: it carries the signatures of a threshold of n's keys, so it comes from who was trusted, and
of a threshold of its own keys, so that no set is put in force that cannot sign. A device that was away walks link by
link; what it has walked past is never looked at again, so a key that was rotated away is gone for good, also when it
leaked and signs a new version 2. A root does not expire, because a device that is offline must come along years later.

The keys of a threshold lie on several machines, and none of them need ever be on one: a draft, which is a link without
signatures, is made from public keys, copies of it are signed where the keys are, and the copies are merged.

The chain travels with every signed document, beside it and with signatures of its own, so there is no message more to
lose. Where a link is refused, so is the document, and nothing of it counts.

Source: The Update Framework, specification 1.0.33, 5.3 (update the root role) and 6.1 (key management and migration).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta, field

from tidegate.config import ConfigError
from tidegate.rollout.canonical import canonical, is_canonical
from tidegate.rollout.desired import PublicKey
from tidegate.security.attestation.software import key_id

MAX_LINKS: Final = 32
_MOST_DRAFT_BYTES: Final = 64 * 1024
_DOMAIN: Final = b"tidegate root, 1\0"


class RootRefused(ValueError):
    """A link of the chain that does not follow from the version before it; the text says why."""


class RootSignature(msgspec.Struct, frozen=True):
    kid: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    signature: bytes = field(name="sig")  # base64 in JSON


class RootKeys(msgspec.Struct, frozen=True):
    """One version of the root: `threshold` of these keys sign desired documents and the next version."""

    version: Annotated[int, Meta(ge=2, le=2**31 - 1)]
    threshold: Annotated[int, Meta(ge=1, le=8)]
    keys: Annotated[tuple[PublicKey, ...], Meta(min_length=1, max_length=8)]
    issued_s: Annotated[int, Meta(ge=0, le=2**53 - 1)] = field(default=0, name="issued")

    def __post_init__(self) -> None:
        if len(self.by_id()) != len(self.keys):
            raise ValueError("a key is there twice")
        if self.threshold > len(self.keys):
            raise ValueError(f"a threshold of {self.threshold} of {len(self.keys)} keys")

    def by_id(self) -> dict[str, bytes]:
        publics = [base64.b64decode(text) for text in self.keys]
        return {key_id(public): public for public in publics}


class RootLink(msgspec.Struct, frozen=True):
    """A version as it travels; the signatures are over the very bytes of `root`."""

    root: msgspec.Raw
    signatures: Annotated[tuple[RootSignature, ...], Meta(max_length=16)] = field(name="sigs")
    v: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class TrustedRoot:
    """What a device trusts: the version that it has walked to."""

    keys: Mapping[str, bytes]  # public keys by their id
    version: int = 1
    threshold: int = 1


_decoder: Final = msgspec.json.Decoder(RootKeys)


def walk(trusted: TrustedRoot, chain: Sequence[RootLink]) -> TrustedRoot:
    """The root at the end of the chain; links up to the trusted version are passed over unread.

    Raises:
        RootRefused: a link leaves out a version, or lacks signatures.
    """
    for link in chain[: MAX_LINKS + 1]:
        trusted = _followed(trusted, link)
    if len(chain) > MAX_LINKS:
        raise RootRefused(f"{len(chain)} links, at most {MAX_LINKS} travel")
    return trusted


def link_of(root: RootKeys, signers: Sequence[Ed25519PrivateKey]) -> RootLink:
    """The version, signed by these keys, of the version before and of its own."""
    raw = canonical(root)
    return RootLink(msgspec.Raw(raw), _signatures(raw, signers))


def with_signature(link: RootLink, signer: Ed25519PrivateKey) -> RootLink:
    """The link with this key's signature beside the others'. Raises RootRefused: it is no root."""
    read_link(link)
    (own,) = _signatures(bytes(link.root), [signer])
    others = tuple(one for one in link.signatures if one.kid != own.kid)
    return RootLink(link.root, (*others, own))


def merged(links: Sequence[RootLink], trusted: TrustedRoot) -> RootLink:
    """One link with the good signatures of several copies of it, as they come back from several machines.

    A signature that is none, or of a key of neither version, is left out: it could only fill the room of good ones.

    Raises:
        RootRefused: the copies are not of one root.
    """
    raw = bytes(links[0].root)
    if any(bytes(link.root) != raw for link in links):
        raise RootRefused("they are copies of different roots: sign copies of one draft")
    keys = {**trusted.keys, **read_link(links[0]).by_id()}
    found = {
        one.kid: one
        for link in links
        for one in link.signatures
        if one.kid in keys and _is_good(keys[one.kid], one.signature, _DOMAIN + raw)
    }
    return RootLink(links[0].root, tuple(found[kid] for kid in sorted(found)))


def lacking(link: RootLink, trusted: TrustedRoot) -> list[str]:
    """What signatures a link lacks, for people: of the version before, and of its own keys; empty when none."""
    root = read_link(link)
    words = []
    for keys, threshold, whose in (
        (trusted.keys, trusted.threshold, f"of version {trusted.version}"),
        (root.by_id(), root.threshold, "of its own"),
    ):
        there = {kid for kid in keys if _signed_by(link, {kid: keys[kid]})}
        if len(there) < threshold:
            open_ = ", ".join(sorted(keys.keys() - there))
            words.append(f"{threshold - len(there)} more {whose} keys: {open_}")
    return words


def read_draft(path: Path) -> RootLink:
    """A root that is still being signed. Raises ConfigError: it cannot be read, or is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_DRAFT_BYTES + 1)
        if len(raw) > _MOST_DRAFT_BYTES:
            raise ConfigError(f"{path} has more than {_MOST_DRAFT_BYTES} bytes, so it is no draft of a root")
        link = msgspec.json.decode(raw, type=RootLink)
        read_link(link)
    except OSError as error:
        raise ConfigError(f"cannot read the draft {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, RootRefused, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no draft of a root: {error}; tidegate keys signing draft writes one") from error
    return link


def encode_draft(link: RootLink) -> bytes:
    """The content of a draft's file."""
    return msgspec.json.encode(link) + b"\n"


def _signatures(raw: bytes, signers: Sequence[Ed25519PrivateKey]) -> tuple[RootSignature, ...]:
    signed = {key_id(one.public_key().public_bytes_raw()): one.sign(_DOMAIN + raw) for one in signers}
    return tuple(RootSignature(kid, signature) for kid, signature in signed.items())


def _followed(trusted: TrustedRoot, link: RootLink) -> TrustedRoot:
    root = read_link(link)
    if root.version <= trusted.version:
        return trusted
    if root.version != trusted.version + 1:
        raise RootRefused(f"version {root.version} does not follow {trusted.version}: the links between are missing")
    own = root.by_id()
    for keys, threshold, whose in (
        (trusted.keys, trusted.threshold, f"version {trusted.version}"),
        (own, root.threshold, "its own"),
    ):
        if (good := _signed_by(link, keys)) < threshold:
            raise RootRefused(f"version {root.version} is signed by {good} of the keys of {whose}, not by {threshold}")
    return TrustedRoot(own, root.version, root.threshold)


def read_link(link: RootLink) -> RootKeys:
    """What a link says, before any check of its signatures. Raises RootRefused."""
    raw = bytes(link.root)
    if not is_canonical(raw):
        raise RootRefused("a link is not canonical JSON")
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise RootRefused(f"a link is no root: {error}") from error


def encode_chain(chain: Sequence[RootLink]) -> bytes:
    """The content of a chain's file."""
    return msgspec.json.encode(chain) + b"\n"


def read_chain(path: Path) -> tuple[RootLink, ...]:
    """The links in a file, the oldest first. Raises ConfigError: it cannot be read, or is none."""
    try:
        links = msgspec.json.decode(path.read_bytes(), type=tuple[RootLink, ...])
        versions = [read_link(link).version for link in links]
    except OSError as error:
        raise ConfigError(f"cannot read the chain of roots {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, RootRefused, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no chain of roots: {error}; tidegate keys signing rotate writes one") from error
    if versions != list(range(2, 2 + len(versions))):
        raise ConfigError(f"{path}: the chain of roots has the versions {versions}, so some are missing")
    return links


def _signed_by(link: RootLink, keys: Mapping[str, bytes]) -> int:
    """How many of the keys have signed it; one that did so twice counts once."""
    message, signatures = _DOMAIN + bytes(link.root), {one.kid: one.signature for one in link.signatures}
    return sum(kid in signatures and _is_good(public, signatures[kid], message) for kid, public in keys.items())


def _is_good(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
