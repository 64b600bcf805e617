"""A desired document states what a device shall run: one signed document per device and per group, with a revision.

    {"v":1, "rev":42, "issued":1763775000, "group":"kiosks", "models":{"digits": PLAN}, "remove":["old"], "urls":[…],
     "configuration":{"settings":{"max_queue_size":32}, "watch":60}}

A document is the whole wish of its scope: it replaces the one before. Revisions count per scope and only grow: a
device refuses a lower one (an old document, however well signed, must not bring an old model back) and an equal one
with other bytes. To go back to an old model a gateway writes a new revision that asks for it.

Over one another. The device's own document, with a plan or a `remove` for a model, overrides its groups';
among groups, the first of the device's list wins. A model that no document speaks of stays as it is: losing a
document, which a broker can cause, must change nothing. So it is with the settings of its configuration
(`device_settings.py`): key by key, the device's own document first. A document without a configuration says nothing
of it; one with an empty one asks for none, and the device has what its own file says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, field

from tidegate.fleet.messages import BadMessage, Name
from tidegate.rollout.canonical import canonical, is_canonical
from tidegate.rollout.device_settings import MAX_SETTINGS, MAX_TEXT, Setting
from tidegate.rollout.plan import ModelName, ModelPlan, Version

MAX_DESIRED_BYTES: Final = (
    98_304  # with its signatures it stays below what a session takes (`tidegate/mqtt/session.py`)
)
Revision = Annotated[int, Meta(ge=1, le=2**53 - 1)]
PublicKey = Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/]{43}=\Z")]  # 32 bytes in base64
BaseUrl = Annotated[str, Meta(pattern=r"^https?://[^\s?#]+\Z", max_length=256)]
SettingKey = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?\Z", max_length=64)]
# Also of keys that are not on the list, so that a device refuses those by name.
SettingValue = bool | int | float | Annotated[str, Meta(max_length=MAX_TEXT)] | None
LocalChanges = Literal["show", "undo"]


class DesiredConfiguration(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings that a device shall have.

    Args:
        settings: by key of `DEVICE_KEYS`, sections with a dot.
        watch_s: how long the device must do well with them before they are its own; else it goes back.
        local: what becomes of settings that were changed on the device by hand: "show" reports them and leaves them
            in force, "undo" reports them for a minute and puts these over them.
    """

    settings: Annotated[dict[SettingKey, SettingValue], Meta(max_length=MAX_SETTINGS)] = {}
    watch_s: Annotated[float, Meta(ge=1, le=86_400)] = field(name="watch", default=60.0)
    local: LocalChanges = "show"


class DesiredDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """The document of one scope: `device` or `group` names it, never both.

    Args:
        revision: of this scope's documents.
        issued_s: UTC seconds, for people and `tidegate model status`; a proof of the time, but it orders nothing.
        expires_s: UTC seconds after which a device does not accept it any more; 0: never. One in force stays.
        min_agent: agents below this version refuse the document and report it.
        urls: bases of the servers of artefacts, best first; `artefact_path` goes behind.
        keys: where not empty, from now on exactly these public keys are trusted for desired documents. Such a document
            is signed by a key that was trusted before and by every one of these.
    """

    revision: Revision = field(name="rev")
    issued_s: Annotated[int, Meta(ge=0, le=2**53 - 1)] = field(name="issued")
    device: Name | Literal[""] = ""
    group: Name | Literal[""] = ""
    models: Annotated[dict[ModelName, ModelPlan], Meta(max_length=64)] = {}
    remove: Annotated[tuple[ModelName, ...], Meta(max_length=64)] = ()
    urls: Annotated[tuple[BaseUrl, ...], Meta(max_length=8)] = ()
    min_agent: Version | Literal[""] = ""
    expires_s: Annotated[int, Meta(ge=0, le=2**53 - 1)] = field(default=0, name="expires")
    keys: Annotated[tuple[PublicKey, ...], Meta(max_length=8)] = ()
    configuration: DesiredConfiguration | None = None
    v: Literal[1] = field(default_factory=lambda: 1)

    def __post_init__(self) -> None:
        if bool(self.device) == bool(self.group):
            raise ValueError("a document is for one `device` or one `group`")
        if self.expires_s and self.expires_s <= self.issued_s:
            raise ValueError(f"`expires` ({self.expires_s}) is not after `issued` ({self.issued_s})")
        if both := sorted(set(self.models) & set(self.remove)):
            raise ValueError(f"{both[0]!r} is in `models` and in `remove`")

    @property
    def scope(self) -> str:
        """ "device/NAME" or "group/NAME"."""
        return f"device/{self.device}" if self.device else f"group/{self.group}"


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """What one model of a device shall be: a plan, or None for none; and the document that says so."""

    plan: ModelPlan | None
    scope: str
    revision: int
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DesiredSettings:
    """What the documents of a device require of its configuration together, and the first document that says so."""

    settings: Mapping[str, Setting]
    watch_s: float
    local: LocalChanges
    scope: str
    revision: int


_decoder: Final = msgspec.json.Decoder(DesiredDocument)


def encode_desired(desired: DesiredDocument) -> bytes:
    """The canonical bytes, which are what is signed."""
    return canonical(desired)


def decode_desired(raw: bytes) -> DesiredDocument:
    """Raises BadMessage: too large, not canonical, or not a document."""
    if len(raw) > MAX_DESIRED_BYTES:
        raise BadMessage(f"{len(raw)} bytes, at most {MAX_DESIRED_BYTES} are allowed")
    if not is_canonical(raw):
        raise BadMessage("not canonical JSON: keys are sorted, without spaces, none twice")
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise BadMessage(str(error)) from error


def desired_models(own: DesiredDocument | None, groups: Sequence[DesiredDocument]) -> Mapping[str, DesiredModel]:
    """By model: what the documents of a device require together. `groups`: in the order of the device's list."""
    found: dict[str, DesiredModel] = {}
    for document in (*((own,) if own else ()), *groups):
        required: dict[str, ModelPlan | None] = {**document.models, **dict.fromkeys(document.remove)}
        for model, plan in required.items():
            found.setdefault(model, DesiredModel(plan, document.scope, document.revision, document.urls))
    return found


def desired_settings(own: DesiredDocument | None, groups: Sequence[DesiredDocument]) -> DesiredSettings | None:
    """The configuration that the documents of a device require together; None where none says anything of it."""
    speaking = [one for one in (*((own,) if own else ()), *groups) if one.configuration is not None]
    settings: dict[str, Setting] = {}
    for document in speaking:
        assert document.configuration is not None
        settings = {**document.configuration.settings, **settings}
    if not speaking or (first := speaking[0].configuration) is None:
        return None
    return DesiredSettings(settings, first.watch_s, first.local, speaking[0].scope, speaking[0].revision)
