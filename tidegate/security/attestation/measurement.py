"""A measurement describes a process: its version and the digests of the models that it serves.

The digests are those of the manifests, which every artefact was checked against before it was loaded. A measurement
has one spelling, so its own digest is a name for it: an operator who knows what should run allows that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256

import msgspec

from tidegate.fleet.offers import ModelOffer
from tidegate.models.manifest import Manifest


class ServedVariant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """One variant of a model."""

    model: str
    version: str
    variant: str
    sha256: str


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`served` is in order: equal measurements have equal digests."""

    tidegate: str
    served: tuple[ServedVariant, ...]

    @property
    def digest(self) -> str:
        """64 hexadecimal digits."""
        return sha256(msgspec.msgpack.encode(self)).hexdigest()


def measure_process(
    version: str, offers: Iterable[ModelOffer], manifest_of: Callable[[str, str], Manifest]
) -> Measurement:
    """Measure a process that offers these models, whose manifests `manifest_of` finds by name and version."""
    return Measurement(version, tuple(sorted(one for offer in offers for one in _served(offer, manifest_of))))


def _served(offer: ModelOffer, manifest_of: Callable[[str, str], Manifest]) -> Iterable[ServedVariant]:
    manifest = manifest_of(offer.name, offer.version)
    for offered in offer.variants:
        variant = manifest.variant(offered.name)
        digest = "unknown" if variant is None else manifest.digest_of(variant)
        yield ServedVariant(offer.name, offer.version, offered.name, digest)
