"""The boot candidates of a model are the generations that an agent may serve at its start, best first.

Per model, the first of these that can be read, verified and loaded: the committed generation, the ones before it that
are kept, the model of the static repository. This needs no network, and a file that is damaged on the disk costs one
generation and not the device. The damaged file is removed, so that it can be fetched again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from edge_agent.delivery.model_store import Deployed, ModelStore
from edge_agent.serving.catalogue import CatalogueEntry, read_entry
from tidegate.models.manifest import EngineName
from tidegate.models.repository import RepositoryError
from tidegate.runtime.process import StartError

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BootCandidate:
    """A generation of a model that may be served. `read` blocks, and raises RepositoryError, StartError or OSError."""

    generation: int
    read: Callable[[], CatalogueEntry]


def boot_candidates(
    model: str, store: ModelStore, statics: Mapping[str, CatalogueEntry], allowed: tuple[EngineName, ...]
) -> Sequence[BootCandidate]:
    """The generations that may be served for a model, best first. Blocks on the disk."""
    found, seen = [], set[str]()
    committed = store.committed()
    if model in committed.models:
        for generation in [committed, *store.kept()]:
            deployed = generation.models.get(model)
            if deployed is not None and deployed.content not in seen and generation.number <= committed.number:
                seen.add(deployed.content)
                found.append(BootCandidate(generation.number, _reader(store, deployed, model, allowed)))
    if model in statics:
        static = statics[model]
        found.append(BootCandidate(0, lambda: static))
    return found


def _reader(
    store: ModelStore, deployed: Deployed, model: str, allowed: tuple[EngineName, ...]
) -> Callable[[], CatalogueEntry]:
    def read() -> CatalogueEntry:
        try:
            store.vouch(deployed)
            return read_entry(store.repository(deployed.content), model, allowed)
        except (RepositoryError, StartError, OSError):
            # A StartError too: a folder without its manifest has no such model. What the configuration refuses of files
            # that are right is kept.
            try:
                store.discard_damaged(deployed.content, deployed.files)
            except OSError as failure:  # the next candidate is served all the same
                log.warning("damaged files cannot be removed", model=model, reason=failure.strerror)
            raise

    return read
