"""The rollout journal keeps a folder for each rollout: the order as it came and the newest state.

    rollouts/ID/order.json     written once, before anything is published
    rollouts/ID/state.json     replaced whole at each change, before that change is published

The journal is written first, documents are published after: after a kill at any instant the gateway publishes again
what it may have published already, which a device takes as the same document.

A rollout is confirmed by its first state. An order without a state is of a rollout whose operator may have been told
that it failed, and which could not be removed: it is held paused, so that it never begins by itself, keeps its devices
and revisions to itself, and waits for a person. A store of several gateways is read in the same way. A folder without a
complete order counts as no rollout.

Every method blocks on the disk: call it in a thread.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gateway.core.versions.canary import CanaryRollout, CanaryState
from gateway.delivery.rollouts.order import InvalidOrder, RolloutOrder, decode_order
from tidegate.storage.atomic_file import sync_folder, write_atomically

KEPT: Final = 200  # finished rollouts; an older one is deleted if it has no device's newest document
UNCONFIRMED: Final = "it was ordered, but never confirmed to have begun: resume it or abort it"
log = structlog.get_logger(__name__)


def rollout_as_recorded(order: RolloutOrder, raw_state: bytes | None) -> CanaryRollout:
    """Return the rollout in its recorded state; without a state it is paused (module's docstring).

    Raises:
        InvalidOrder: the bytes are no state of this order.
    """
    if raw_state is None:
        waves = CanaryRollout(order.spec)
        waves.pause(UNCONFIRMED)
        return waves
    try:
        state = msgspec.json.decode(raw_state, type=CanaryState)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidOrder(f"its state: {error}") from error
    if set(state.parts) != set(order.spec.devices):
        raise InvalidOrder("its state is of other devices")
    return CanaryRollout(order.spec, state)


class RolloutJournal:
    """The journal in one folder, which is created with the first rollout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, order: RolloutOrder) -> None:
        """Write the order of a new rollout. Raises OSError: `forget` removes what there is of it."""
        folder = self.folder / order.spec.id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").unlink(missing_ok=True)  # of a rollout of the same id that could not be read
        write_atomically(folder / "order.json", msgspec.json.encode(order))
        sync_folder(self.folder)

    def save(self, id: str, state: bytes) -> None:
        """Replace the state of a rollout. Raises OSError."""
        write_atomically(self.folder / id / "state.json", state, parents=True)

    def forget(self, id: str) -> None:
        with suppress(OSError):  # the order first: without its state it would be a rollout that waits for a person
            (self.folder / id / "order.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / id, ignore_errors=True)

    def load(self) -> list[tuple[RolloutOrder, CanaryRollout]]:
        """Return every rollout, oldest first. One that cannot be read stays on the disk and is logged."""
        found = []
        for folder in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            try:
                order = decode_order((folder / "order.json").read_bytes())
                state = folder / "state.json"
                waves = rollout_as_recorded(order, state.read_bytes() if state.exists() else None)
                found.append(((folder / "order.json").stat().st_mtime_ns, order, waves))
            except (OSError, InvalidOrder) as error:
                log.error("a rollout cannot be read and is left alone", folder=str(folder), reason=str(error))
        return [(order, waves) for _, order, waves in sorted(found, key=lambda one: one[0])]

    def __repr__(self) -> str:
        return f"<RolloutJournal {self.folder}>"
