"""Which models judge their own answers, and whether their unsure ones go further: read from manifests, once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.core.request.escalation import Escalations
from tidegate.models.confidence import ConfidenceMeasure
from tidegate.models.generative import CommitWindow
from tidegate.models.manifest import Manifest

_MOST: Final = 1024  # models and versions


class ConfidencePolicy(NamedTuple):
    """One model that judges itself: whole answers by a measure, or a generation's beginning."""

    escalations: Escalations
    judge: ConfidenceMeasure | None = None
    window: CommitWindow | None = None
    improvable: frozenset[str] = frozenset()  # of a generating model: variants whose beginnings are judged


class ConfidencePolicies:
    """Mutable: remembers each model's, for as long as its manifest is the one that it was read from."""

    def __init__(self, manifest_of: Callable[[str, str], Manifest], overloaded: Callable[[], bool]) -> None:
        self._manifest_of = manifest_of
        self._overloaded = overloaded
        self._known: dict[tuple[str, str], tuple[Manifest, ConfidencePolicy | None]] = {}

    def of(self, model: str, version: str) -> ConfidencePolicy | None:
        """The policy for this version's answers; None: they are not judged. Raises ModelNotFound."""
        key, manifest = (model, version), self._manifest_of(model, version)
        known = self._known.get(key)
        if known is None or (known[0] is not manifest and known[0] != manifest):  # a reload brings another
            if len(self._known) >= _MOST:
                self._known.clear()  # most are of versions that are gone
            known = self._known[key] = manifest, self._judged(manifest)
        return known[1]

    def _judged(self, manifest: Manifest) -> ConfidencePolicy | None:
        how, window = manifest.confidence, None if manifest.generative is None else manifest.generative.commit_window
        if window is not None:
            escalations = Escalations(
                window.threshold, max_share=window.max_share, overloaded=self._overloaded, window=window.tokens
            )
            return ConfidencePolicy(escalations, window=window, improvable=manifest.improvable)
        if how is None:
            return None
        escalations = Escalations(how.threshold, max_share=how.max_share, overloaded=self._overloaded)
        return ConfidencePolicy(escalations, ConfidenceMeasure(manifest, how))

    def __repr__(self) -> str:
        judged = [f"{model}:{version}" for (model, version), (_, one) in self._known.items() if one is not None]
        return f"<ConfidencePolicies of {', '.join(judged) or 'none'}>"
