"""The deployment journal stores the state of this device's rollouts in one small file, before it is acted upon.

One record per model, its newest rollout, and the contents that are not tried again. The file is replaced as a whole
(`tidegate/storage/atomic_file.py`), so after a power cut it is the state before a transition or after it and never half
of one; which of the two does not matter, since each state's work can be done again.

A journal that cannot be read, for its content or for a bad block, is put aside and begun anew: the committed generation
is not in it, so the device serves on; and the documents, which are not in it either, request the interrupted rollout
again. A bad block stays bad, so to wait until it can be read would stop all rollouts for good.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog
from msgspec.structs import replace

from edge_agent.core.rollout_machine import Rollout
from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.disk_failure import is_disk_failure

MAX_BLOCKED: Final = 64
log = structlog.get_logger(__name__)


class JournalContent(msgspec.Struct, frozen=True):
    records: dict[str, Rollout] = {}
    blocked: dict[str, dict[str, int]] = {}
    v: Literal[1] = 1


class DeploymentJournal:
    """Read once by `open`; `write` and `forget` block for the disk and raise OSError with nothing changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = JournalContent()

    @property
    def records(self) -> Mapping[str, Rollout]:
        return self._content.records

    @property
    def blocked(self) -> Mapping[str, Mapping[str, int]]:
        return self._content.blocked

    def open(self) -> None:
        """Read the journal, or begin it anew. Raises OSError, where a damaged one cannot be put aside."""
        try:
            self._content = msgspec.json.decode(self.path.read_bytes(), type=JournalContent)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            if isinstance(error, OSError) and not is_disk_failure(error):
                raise
            log.warning("the rollout journal is damaged; beginning anew", path=str(self.path), reason=str(error))
            os.replace(self.path, self.path.with_name(self.path.name + ".damaged"))

    def write(self, rollout: Rollout) -> None:
        """Write a model's newest rollout."""
        blocked = dict(self._content.blocked)
        if rollout.blocked and rollout.state.is_settled:
            earlier = blocked.pop(rollout.content, {})
            blocked[rollout.content] = {**earlier, rollout.scope: rollout.revision}
            blocked = dict(list(blocked.items())[-MAX_BLOCKED:])
        self._replace(JournalContent({**self._content.records, rollout.model: rollout}, blocked))

    def forget(self, model: str) -> None:
        records = {name: record for name, record in self._content.records.items() if name != model}
        self._replace(replace(self._content, records=records))

    def _replace(self, content: JournalContent) -> None:
        write_atomically(self.path, msgspec.json.encode(content), parents=True)
        self._content = content

    def __repr__(self) -> str:
        return f"<DeploymentJournal {', '.join(map(repr, self.records.values())) or 'empty'}>"
