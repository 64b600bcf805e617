"""An order for a rollout, made and signed where the operator's key is: two documents for each device.

A rollout brings a version of a model, or settings; both are parts of one document, so that one revision orders them.

A device's document lists every model that it shall run, so what its newest document says of other models is carried
over, unchanged, and only where one of the operator's own keys has signed it: else a gateway under an attacker's control
could have documents of its own signed. The document for the way back is the same with the model as it was: by the
device's last document, or by the version that it runs, or without the model if it had none. Its plan asks neither probe
nor soak of what has served before; to go back must not wait.

Pure: the gateway's report goes in, an order comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from tidegate.fleet.messages import BadMessage
from tidegate.fleet.reported import Reported, RolloutState
from tidegate.rollout.desired import DesiredDocument
from tidegate.rollout.plan import ModelPlan, Probe, Soak
from tidegate.rollout.root_chain import RootLink
from tidegate.rollout.signing import SignatureRefused, public_text, sign_document, verify_document
from tidegate.security.attestation.software import key_id

_AT_ONCE: Final = Soak(duration_s=0.0)
_WAYS: Final = ("forward", "back")


class OrderError(Exception):
    """No order can be made of what there is; the message names the device and the way out."""


class ListedOffer(msgspec.Struct, frozen=True):
    name: str
    version: str
    state: str = "ready"


class ListedConfiguration(msgspec.Struct, frozen=True):
    """How the device's settings are to those that the gateway desires."""

    state: str
    evidence: str = ""


class ListedDevice(msgspec.Struct, frozen=True):
    """A device as the gateway reports it (`GET /v1/devices`)."""

    name: str
    freshness: str
    revision: int
    document: str | None = None
    reported: Reported | None = None
    offers: tuple[ListedOffer, ...] = ()
    configuration: ListedConfiguration | None = None

    @property
    def takes_documents(self) -> bool:
        return self.reported is not None and self.reported.takes_rollouts

    def running(self, model: str) -> str:
        """The version that answers now; "" where there is none."""
        for report in self.reported.models if self.reported else ():
            if report.name == model and report.running:
                return report.running
        return next((one.version for one in self.offers if one.name == model), "")

    def has_committed(self, model: str, plan: ModelPlan) -> bool:
        reports = self.reported.models if self.reported else ()
        wanted = (model, RolloutState.COMMITTED, plan.content)
        return any((one.name, one.state, one.content) == wanted for one in reports)


@dataclass(frozen=True, slots=True)
class OrderSigning:
    """The keys that sign an order.

    Attributes:
        keys: all of them sign; the first is the one that devices trust now.
        rotate: whether devices shall trust exactly these keys but the first from now on.
        roots: the chain of roots, for devices that have missed a part of it.
    """

    keys: Sequence[Ed25519PrivateKey]
    rotate: bool = False
    roots: Sequence[RootLink] = ()

    @property
    def trusted(self) -> Mapping[str, bytes]:
        publics = [key.public_key().public_bytes_raw() for key in self.keys]
        return {key_id(public): public for public in publics}

    @property
    def successors(self) -> tuple[str, ...]:
        new = self.keys[1:] if self.rotate else ()
        return tuple(public_text(key.public_key().public_bytes_raw()) for key in new)


@dataclass(frozen=True, slots=True)
class OrderTerms:
    """What the rollout's documents have in common."""

    model: str
    plan: ModelPlan
    urls: tuple[str, ...]
    issued_s: int
    replace_unsigned: bool = False
    expires_s: int = 0  # UTC seconds; 0: never


def make_order(
    spec: Mapping[str, Any],
    devices: Sequence[ListedDevice],
    terms: OrderTerms,
    plan_of: Callable[[str], ModelPlan],
    signing: OrderSigning,
) -> bytes:
    """The order, as the gateway takes it.

    Args:
        spec: its fields but for devices and revisions (`gateway/core/versions/canary.py`).
        plan_of: the plan of an older version by its name, from the operator's repository.

    Raises:
        OrderError: a device's newest document is not by these keys.
    """
    pairs: dict[str, tuple[DesiredDocument, DesiredDocument]] = {}
    for device in devices:
        standing = standing_document(device, signing, replace_unsigned=terms.replace_unsigned)
        before = standing.models.get(terms.model)
        if before is None and (version := device.running(terms.model)):
            before = plan_of(version)
        forward = replace(
            standing,
            revision=device.revision + 1,
            issued_s=terms.issued_s,
            expires_s=terms.expires_s,
            models={**standing.models, terms.model: terms.plan},
            remove=tuple(name for name in standing.remove if name != terms.model),
            urls=terms.urls or standing.urls,
            keys=signing.successors,
        )
        others = {name: plan for name, plan in standing.models.items() if name != terms.model}
        back = replace(
            forward,
            revision=device.revision + 2,
            models=others if before is None else {**others, terms.model: replace(before, probe=Probe(), soak=_AT_ONCE)},
            remove=(*forward.remove, terms.model) if before is None else forward.remove,
        )
        pairs[device.name] = forward, back
    return signed_order(spec, pairs, signing)


def signed_order(
    spec: Mapping[str, Any], pairs: Mapping[str, tuple[DesiredDocument, DesiredDocument]], signing: OrderSigning
) -> bytes:
    """The order of these devices' documents forward and back, in their order."""
    documents = {
        name: {
            way: msgspec.Raw(sign_document(one, signing.keys, signing.roots))
            for way, one in zip(_WAYS, pair, strict=True)
        }
        for name, pair in pairs.items()
    }
    revisions = {
        name: {way: one.revision for way, one in zip(_WAYS, pair, strict=True)} for name, pair in pairs.items()
    }
    whole = {**spec, "devices": list(pairs), "revisions": revisions}
    return msgspec.json.encode({"spec": whole, "documents": documents})


def standing_document(device: ListedDevice, signing: OrderSigning, *, replace_unsigned: bool) -> DesiredDocument:
    """The contents of the device's newest document; of one that it has had none, an empty one.

    Raises:
        OrderError: it is not by these keys, and `replace_unsigned` does not leave it out.
    """
    if device.document is None:
        return DesiredDocument(1, 0, device=device.name)
    try:
        return verify_document(device.document.encode(), signing.trusted)[0]
    except (SignatureRefused, BadMessage) as error:
        if replace_unsigned:
            return DesiredDocument(1, 0, device=device.name)
        raise OrderError(
            f"the newest document of {device.name} is not by your key: {error}. Show that key too (--key), or write "
            "over it, other models' plans included (--replace)"
        ) from error
