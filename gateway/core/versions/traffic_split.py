"""A traffic split decides which of two versions of a model answers: by a share, a tenant, or the caller's header.

    the caller says which (`tidegate-version: candidate | standing | 2`)    that one, and no other in its place
    the caller's tenant is among the candidate's                            candidate, then the default
    a drawn share                                                           candidate, then the default
    all others                                                              the default: standing, while it is served

A request that came to the candidate by a share or a tenant did not ask for it, so it does not bear its failure: the
standing version answers instead. The other way round it does not: work that the standing version has no room for would
rush a version that is on trial. A version that a caller demands is answered by itself or not at all, as with every
demand.

Promotion makes the candidate the preferred version; the return ends the split and changes nothing else, so that
requests get what they got before. A standing version that the operator named is preferred from then on. What a
preference means, and what happens where no target serves it: `default_version.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from gateway.core.versions.default_version import NO_PREFERENCE, VersionPreference

CANDIDATE, STANDING = "candidate", "standing"
MAX_TENANTS: Final = 1000
MAX_FOLLOWED: Final = 100
T = TypeVar("T")


class InvalidSplit(ValueError):
    """What an operator asks for makes no sense; the message says why."""


class TrafficSplit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two versions of one model side by side.

    Args:
        share: of the requests that name no version, from 0 to 1.
        tenants: whose requests all go to the candidate.
        compare: the share of the standing version's answers of which the candidate is asked too, for comparison.
    """

    standing: str
    candidate: str
    share: float = 0.0
    tenants: tuple[str, ...] = ()
    compare: float = 0.0

    def __post_init__(self) -> None:
        if self.standing == self.candidate:
            raise InvalidSplit(f"the candidate is the standing version {self.standing!r}: there is nothing to split")
        for name, value in (("share", self.share), ("compare", self.compare)):
            if not 0.0 <= value <= 1.0:
                raise InvalidSplit(f"{name} must be a number from 0 to 1, got {value:g}")
        if len(self.tenants) > MAX_TENANTS:
            raise InvalidSplit(f"tenants: at most {MAX_TENANTS}, got {len(self.tenants)}")


class TrafficSplits(msgspec.Struct, frozen=True):
    """All that is set by model: its split, its preferred version, and what was rolled out since that preference."""

    split: Mapping[str, TrafficSplit] = {}
    promoted: Mapping[str, str] = {}
    followed: Mapping[str, tuple[str, ...]] = {}

    def demanded(self, model: str, wish: str) -> str:
        """The version that a caller's header demands; "" where it demands none. It may be none that is known.

        A header `candidate` or `standing` that outlives its split demands nothing.
        """
        split = self.split.get(model)
        if split is None:
            return "" if wish in (CANDIDATE, STANDING) else wish
        return {CANDIDATE: split.candidate, STANDING: split.standing}.get(wish, wish)

    def tried(self, model: str, tenant: str, draw: float) -> str:
        """The version to try ahead of the default; "" for none.

        Args:
            draw: uniform in [0, 1).
        """
        split = self.split.get(model)
        return split.candidate if split is not None and (tenant in split.tenants or draw < split.share) else ""

    def preference(self, model: str) -> VersionPreference:
        """What the default version is derived from."""
        split = self.split.get(model)
        if split is not None:
            return VersionPreference(split.standing, alone=True)
        version = self.promoted.get(model)
        return VersionPreference(version, self.followed.get(model, ())) if version else NO_PREFERENCE

    def begun(self, model: str, split: TrafficSplit, *, prefer: bool = False) -> TrafficSplits:
        """With this split in the place of any other of the model.

        Args:
            prefer: whether the operator named the standing version, and it stays preferred after the split.
        """
        chosen = self._preferring(model, split.standing) if prefer else self
        return msgspec.structs.replace(chosen, split={**self.split, model: split})

    def after_promotion(self, model: str) -> TrafficSplits:
        """Raises InvalidSplit: there is no candidate."""
        candidate = self.of(model).candidate
        return msgspec.structs.replace(self._preferring(model, candidate), split=_without(self.split, model))

    def after_return(self, model: str) -> TrafficSplits:
        """Requests get what they got before the split. Raises InvalidSplit: there is none."""
        self.of(model)
        return msgspec.structs.replace(self, split=_without(self.split, model))

    def after_rollout(self, model: str, version: str) -> TrafficSplits:
        """A version that is rolled out has a share of its own beside one that was preferred before."""
        preferred, followed = self.promoted.get(model), self.followed.get(model, ())
        if preferred is None or version == preferred or version in followed:
            return self
        return msgspec.structs.replace(self, followed={**self.followed, model: (*followed, version)[-MAX_FOLLOWED:]})

    def after_recall(self, model: str, version: str) -> TrafficSplits:
        """A version that devices are called back from is preferred no longer, and stands in no split.

        As the candidate of a split it may stay: what requests get by default is another version.
        """
        splits = self
        if (split := self.split.get(model)) is not None and split.standing == version:
            splits = msgspec.structs.replace(splits, split=_without(splits.split, model))
        if self.promoted.get(model) == version:
            splits = msgspec.structs.replace(
                splits, promoted=_without(splits.promoted, model), followed=_without(splits.followed, model)
            )
        return splits

    def of(self, model: str) -> TrafficSplit:
        """Raises InvalidSplit: no candidate of the model is on trial."""
        if model not in self.split:
            raise InvalidSplit(
                f"no candidate of {model!r} is on trial; `tidegate model split {model} VERSION` begins a trial"
            )
        return self.split[model]

    def _preferring(self, model: str, version: str) -> TrafficSplits:
        return msgspec.structs.replace(
            self, promoted={**self.promoted, model: version}, followed=_without(self.followed, model)
        )


def _without(settings: Mapping[str, T], model: str) -> dict[str, T]:
    return {name: one for name, one in settings.items() if name != model}
