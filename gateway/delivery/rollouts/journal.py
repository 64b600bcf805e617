"""The rollout journal keeps a folder for each rollout: the order as it came and the newest state.

    rollouts/ID/order.json     written once, before anything is published
    rollouts/ID/state.json     replaced whole at each change, before that change is published

The journal is written first, documents are published after: after a kill at any instant the gateway publishes again
what it may have published already, which a device takes as the same document. A folder without a complete order is of a
rollout whose operator got no confirmation.

Every method blocks on the disk: call it in a thread.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gateway.core.versions.canary import CanaryRollout, CanaryState
from gateway.delivery.rollouts.order import InvalidOrder, RolloutOrder, decode_order
from tidegate.storage.atomic_file import sync_folder, write_atomically

KEPT: Final = 200  # finished rollouts; an older one is deleted if it has no device's newest document
log = structlog.get_logger(__name__)


class RolloutJournal:
    """The journal in one folder, which is created with the first rollout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, order: RolloutOrder) -> None:
        """Write the order of a new rollout. Raises OSError."""
        folder = self.folder / order.spec.id
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "order.json", msgspec.json.encode(order))
        sync_folder(self.folder)

    def save(self, id: str, state: bytes) -> None:
        """Replace the state of a rollout. Raises OSError."""
        write_atomically(self.folder / id / "state.json", state, parents=True)

    def forget(self, id: str) -> None:
        shutil.rmtree(self.folder / id, ignore_errors=True)

    def load(self) -> list[tuple[RolloutOrder, CanaryRollout]]:
        """Return every rollout, oldest first. One that cannot be read stays on the disk and is logged."""
        found = []
        for folder in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            try:
                order = decode_order((folder / "order.json").read_bytes())
                state = folder / "state.json"
                known = msgspec.json.decode(state.read_bytes(), type=CanaryState) if state.exists() else None
                if known is not None and set(known.parts) != set(order.spec.devices):
                    raise InvalidOrder("its state is of other devices")
                found.append(((folder / "order.json").stat().st_mtime_ns, order, CanaryRollout(order.spec, known)))
            except (OSError, InvalidOrder, msgspec.MsgspecError) as error:
                log.error("a rollout cannot be read and is left alone", folder=str(folder), reason=str(error))
        return [(order, waves) for _, order, waves in sorted(found, key=lambda one: one[0])]

    def __repr__(self) -> str:
        return f"<RolloutJournal {self.folder}>"
