"""A rollout order, as an operator's command sends it: the devices, the waves, and every document, signed.

The gateway needs no key and holds none: both documents of each device, the one forward and the one for the way back,
are signed where the operator's key is, before the rollout begins. So an attacker on a gateway or a broker can delay
a rollout or call it back, but cannot put a model on a device that its operator has not signed.

This module checks that the order can be carried out: that documents are of these devices, revisions and versions, and
that every file they name is in the store. Whether the right key has signed them is checked by the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from gateway.core.versions.canary import RolloutSpec
from gateway.delivery.artifacts.store import ArtifactStore
from tidegate.fleet.messages import BadMessage
from tidegate.models.manifest import Manifest
from tidegate.models.repository import MAX_MANIFEST_BYTES, parse_manifest
from tidegate.rollout.desired import DesiredConfiguration, DesiredDocument
from tidegate.rollout.device_settings import SettingRefused, checked, settings_digest
from tidegate.rollout.plan import ModelPlan
from tidegate.rollout.signing import read_unverified


class InvalidOrder(ValueError):
    """An order that cannot be carried out; the message says why."""


class DeviceDocuments(msgspec.Struct, frozen=True):
    """The two signed messages for one device, as they are published."""

    forward: msgspec.Raw
    back: msgspec.Raw

    def message(self, *, back: bool) -> bytes:
        return bytes(self.back if back else self.forward)


class RolloutOrder(msgspec.Struct, frozen=True):
    spec: RolloutSpec
    documents: dict[str, DeviceDocuments]


_decoder = msgspec.json.Decoder(RolloutOrder)


def decode_order(raw: bytes) -> RolloutOrder:
    """Return the order. Raises InvalidOrder: the bytes are none."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidOrder(str(error)) from error


def plans_of(order: RolloutOrder) -> tuple[ModelPlan, ...]:
    """Return the distinct plans of the order's documents; none of an order of a configuration.

    Raises:
        InvalidOrder: a document contradicts the order.
    """
    spec = order.spec
    plans: dict[str, ModelPlan] = {}
    if set(order.documents) != set(spec.devices):
        raise InvalidOrder("there must be documents for exactly the devices of the order")
    if spec.kind == "configuration":
        _check_configurations(order)
        return ()
    for device, documents in order.documents.items():
        revisions = spec.revisions[device]
        forward = _read(device, revisions.forward, documents.message(back=False))
        back = _read(device, revisions.back, documents.message(back=True))
        plan, before = forward.models.get(spec.model), back.models.get(spec.model)
        if plan is None or plan.version != spec.version:
            raise InvalidOrder(f"the document of {device} does not ask for {spec.model} in version {spec.version}")
        if before is None and spec.model not in back.remove:
            raise InvalidOrder(f"the document for {device}'s way back says nothing about {spec.model}")
        plans |= {one.digest: one for one in (plan, before) if one is not None}
    return tuple(plans.values())


def configuration_of(message: bytes) -> tuple[int, DesiredConfiguration | None]:
    """Return the revision of a document, and what it desires of the device's configuration. Raises BadMessage."""
    desired = read_unverified(message)
    return desired.revision, desired.configuration


def _check_configurations(order: RolloutOrder) -> None:
    for device, documents in order.documents.items():
        revisions = order.spec.revisions[device]
        forward = _read(device, revisions.forward, documents.message(back=False)).configuration
        back = _read(device, revisions.back, documents.message(back=True)).configuration
        if forward is None or settings_digest(forward.settings) != order.spec.version:
            raise InvalidOrder(f"the document of {device} does not ask for the configuration {order.spec.version}")
        if back is None:
            raise InvalidOrder(f"the document for {device}'s way back says nothing about its configuration")
        try:
            checked(forward.settings)
        except SettingRefused as error:
            raise InvalidOrder(f"the document of {device}: {error}") from error


def has_way_back(order: RolloutOrder, device: str) -> bool:
    """Return whether the device had a version of the model before, which the document for its way back asks for."""
    documents = order.documents[device]
    back = _read(device, order.spec.revisions[device].back, documents.message(back=True))
    return order.spec.model in back.models


def missing_artefacts(plans: Iterable[ModelPlan], store: ArtifactStore) -> Mapping[str, str]:
    """Return files of the plans that the store lacks, or has in another size: path by digest. Blocks on the disk."""
    files = (artefact for plan in plans for artefact in plan.artefacts)
    return {one.sha256: one.path for one in files if store.size_bytes(one.sha256) != one.size_bytes}


def manifest_of(plan: ModelPlan, model: str, store: ArtifactStore, told: Mapping[str, bytes]) -> Manifest:
    """Return the manifest of a plan's version. Blocks on the disk. Raises InvalidOrder, RepositoryError.

    Args:
        told: manifests by digest, for those that are not in the store.
    """
    path = store.path(plan.manifest)
    manifest = parse_manifest(_manifest_text(path, plan.manifest, told), path)
    if (manifest.name, manifest.version) != (model, plan.version):
        raise InvalidOrder(
            f"{path} is the manifest of {manifest.name} {manifest.version}, not of {model} {plan.version}"
        )
    return manifest


def manifests_here(plans: Iterable[ModelPlan], store: ArtifactStore) -> Mapping[str, bytes]:
    """Return the plans' manifests that are in the store, as they are, by digest. Blocks on the disk."""
    found = {}
    for plan in plans:
        with suppress(OSError), store.path(plan.manifest).open("rb") as file:
            found[plan.manifest] = file.read(MAX_MANIFEST_BYTES)
    return found


def _manifest_text(path: Path, digest: str, told: Mapping[str, bytes]) -> str:
    """Of the file; where it is not here, of what has its digest."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raw = told.get(digest, b"")
        if sha256(raw).hexdigest() != digest:
            raise InvalidOrder(f"{path}: cannot read the manifest: {error}") from error
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidOrder(f"{path}: cannot read the manifest: {error}") from error


def _read(device: str, revision: int, message: bytes) -> DesiredDocument:
    try:
        desired = read_unverified(message)
    except BadMessage as error:
        raise InvalidOrder(f"a document of {device}: {error}") from error
    if (desired.device, desired.revision) != (device, revision):
        raise InvalidOrder(
            f"a document for {desired.scope}, revision {desired.revision}, stands where one for {device}, "
            f"revision {revision}, belongs"
        )
    return desired
