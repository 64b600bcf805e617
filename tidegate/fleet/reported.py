"""A device's report on its rollouts and its configuration: what is in force, its stage, and the reason if it is stuck.

A register like inventory (retained, ordered by epoch and sequence), with one difference: it outlives its session.
The last report of a device is still the best knowledge about it while it reconnects, so a new birth does not clear
it; the next report, of the greater epoch, replaces it.

    planned → downloading → verified → staged → loading → warm → probed → active → committed
    deferred (reason: metered · window · ram · disk · thermal)      failed (reason) before anything was changed
    rolling_back → rolled_back (reason) after that

A reason begins with a word for machines; the text after a colon is for people.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

Text = Annotated[str, Meta(max_length=300)]
Number = Annotated[int, Meta(ge=0, le=2**53 - 1)]


class RolloutState(StrEnum):
    """Where one model's rollout is; the device's machine, with its transitions, is `core/rollout_machine.py`."""

    PLANNED = "planned"
    DOWNLOADING = "downloading"
    VERIFIED = "verified"
    STAGED = "staged"
    LOADING = "loading"
    WARM = "warm"
    PROBED = "probed"
    ACTIVE = "active"  # it answers requests, and soaks
    COMMITTED = "committed"
    ROLLING_BACK = "rolling_back"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"
    DEFERRED = "deferred"

    @property
    def is_settled(self) -> bool:
        """Nothing more will happen until another document comes."""
        return self in _SETTLED


_SETTLED = frozenset({RolloutState.COMMITTED, RolloutState.ROLLED_BACK, RolloutState.FAILED})


class ModelReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model's rollout on one device.

    Args:
        name: of the model.
        state, reason: where its newest plan is, and why; "" where there is nothing to explain.
        version, content: of the newest plan (`ModelPlan.content`).
        scope, revision: the document that requires it.
        running: the version that answers requests now, whichever generation that is; "" for none.
        generation: the number of the generation that runs; 0 for the one of the static repository, or none.
        done_bytes, total_bytes: of fetching. fetched_bytes: over the network, retries included.
        requests, errors: answered by the new generation while it soaks.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)] = field(name="model")
    state: RolloutState
    version: Annotated[str, Meta(max_length=64)] = field(name="ver", default="")
    content: Annotated[str, Meta(max_length=64)] = field(name="content", default="")
    reason: Text = ""
    scope: Annotated[str, Meta(max_length=80)] = ""
    revision: Number = field(name="rev", default=0)
    running: Annotated[str, Meta(max_length=64)] = ""
    generation: Number = field(name="gen", default=0)
    done_bytes: Number = field(name="done", default=0)
    total_bytes: Number = field(name="total", default=0)
    fetched_bytes: Number = field(name="fetched", default=0)
    requests: Number = field(name="req", default=0)
    errors: Number = field(name="err", default=0)


class DocumentRefusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """The newest document of a scope that was not accepted, and why: `signature`, `root`, `revision`, `malformed`.

    Args:
        revision: that it claims, though nobody may have vouched for it; 0: it could not be read.
    """

    scope: Annotated[str, Meta(max_length=80)]
    reason: Text
    revision: Number = field(name="rev", default=0)


class SettingDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A setting that is not what the documents desire.

    Args:
        value: in force.
        why: "hand" it was changed on the device, "start" it waits for the agent's next start, "returned" the device
            did not do well with the desired one, "" it is on its way.
    """

    key: Annotated[str, Meta(max_length=64)]
    value: bool | int | float | Annotated[str, Meta(max_length=64)] | None
    why: Literal["hand", "start", "returned", ""] = ""


class ConfigurationReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device's configuration, as far as it can be changed from outside (`tidegate/rollout/device_settings.py`).

    Args:
        state: `committed`, `planned` (accepted and not begun), `active` (on trial) or `rolled_back`.
        reason: of the last.
        digest: of all settings in force; devices of one configuration have one digest.
        scope, revision: the document that desires something of it; "" and 0 for none.
        kept: digest of the settings in force under the desired keys: equal to the desired ones' where it has no drift.
        differs: those that are not as desired, and with "start" those of the device's own file that wait as well.
        file: why the device's own file of settings (`device_file`) is refused; "" where it is not.
    """

    state: RolloutState
    digest: Annotated[str, Meta(max_length=16)]
    reason: Text = ""
    scope: Annotated[str, Meta(max_length=80)] = ""
    revision: Number = field(name="rev", default=0)
    kept: Annotated[str, Meta(max_length=16)] = ""
    differs: Annotated[tuple[SettingDifference, ...], Meta(max_length=64)] = ()
    file: Text = ""


class Reported(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of a device's rollouts, and its configuration.

    Args:
        accepted: by scope ("device/NAME", "group/NAME"), the revision that is in force.
        groups: the groups whose documents apply to it, so that operators can select its like.
        configuration: None: its agent is one that cannot be configured from outside.
        takes_rollouts: False of a device that accepts no documents and reports its configuration alone.
    """

    device: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._~-]{0,63}\Z")] = field(name="dev")
    epoch: Annotated[int, Meta(ge=1, le=2**53 - 1)] = field(name="e")
    sequence: Annotated[int, Meta(ge=1, le=2**53 - 1)] = field(name="s")
    mono_ms: Number = field(name="m")
    accepted: Annotated[dict[Annotated[str, Meta(max_length=80)], Number], Meta(max_length=32)] = {}
    models: Annotated[tuple[ModelReport, ...], Meta(max_length=64)] = ()
    refused: Annotated[tuple[DocumentRefusal, ...], Meta(max_length=32)] = ()
    groups: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=16)] = ()
    configuration: ConfigurationReport | None = field(name="conf", default=None)
    takes_rollouts: bool = field(name="roll", default=True)
    v: Literal[1] = field(default_factory=lambda: 1)
