"""The default version is what a request that names no version gets: always one that a target serves, if any does.

A stored default that no target serves is an outage that looks well: the gateway, its targets and every request with a
version work. So nothing here is stored as *the* default. What is stored is a preference, and the default is derived
from it and from what targets serve at the moment of the request:

    1  the preferred version                     an operator's word: `model promote`, `model split --standing`
    2  the highest of the repository             and of foreign servers
    3  others interchangeable with 2             of the repository first, then shipped ones; the highest first
    4  all others                                in the same order

The first that is served is the *reference*: requests are checked against its manifest, and only versions
interchangeable with it may answer them. Versions that differ in tensors or tokenizer follow last, because a caller
notices the difference; a default that nothing answers would be worse.

Among the interchangeable versions requests are shared by the devices that have them (`version_shares.py`), so that
requests move with the devices of a rollout. Which versions have a share of their own:

    a preferred version is served     those rolled out after it was preferred; all others' share is the preferred one's
    none is preferred or served       all, where any version was shipped; else the reference alone

A rollout after a promotion gets requests this way, for its soak and by its devices, without an undoing of the
promotion. A rollback of the preferred version takes the preference back, since devices leave it.

Invariants: where any version is served the reference is served; shares are of served versions, and add up to 1;
the same values give the same default, in any order in which they were learned.
It can be wrong for a moment after a target's offer has changed and its news has not arrived; requests that find no
target then are placed anew (`gateway/layers/versions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from gateway.core.versions.version_shares import VersionTargets, shares_by_version

_NOTHING: Final = 1e-9  # what rounding leaves of a share


class KnownVersions(NamedTuple):
    """The versions of one model of which the gateway has a manifest.

    Args:
        standing: of the repository and of foreign servers, the highest first.
        shipped: of rollouts only, the highest first.
        alike: by version: those interchangeable with it, itself included.
        rolled_out: whether a rollout has moved any of them, so that requests go by the devices that have each.
    """

    standing: tuple[str, ...]
    shipped: tuple[str, ...]
    alike: Mapping[str, frozenset[str]]
    rolled_out: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.standing, *self.shipped)


class VersionPreference(NamedTuple):
    """What operators have said of one model.

    Args:
        version: preferred; "" for none.
        followed: versions rolled out since, which have a share of their own beside it.
        alone: whether no version has a share beside it, as during a traffic split.
    """

    version: str = ""
    followed: tuple[str, ...] = ()
    alone: bool = False


NO_PREFERENCE = VersionPreference()


class VersionLine(NamedTuple):
    """The versions that may answer a request of one model that names none: the reference, then the others.

    Args:
        sharing: those that have a share of their own. The others answer only where none of these finds a target.
    """

    names: tuple[str, ...]
    sharing: frozenset[str] = frozenset()


def fallback_order(known: KnownVersions, preferred: str) -> tuple[str, ...]:
    """Return all versions in the order in which they are the reference."""
    everything = known.all
    first = [preferred] if preferred in everything else []
    alike = known.alike[everything[0]]
    rest = sorted((one for one in everything if one not in first), key=lambda one: one not in alike)  # stable
    return (*first, *rest)


def reference_version(order: Sequence[str], served: Callable[[str], object]) -> str:
    """Return the first version that is served; the first of all where none is."""
    return next((one for one in order if served(one)), order[0])


def line_of(known: KnownVersions, order: Sequence[str], reference: str, preference: VersionPreference) -> VersionLine:
    """Return the versions that may answer for the reference."""
    alike = known.alike[reference]
    names = (reference, *(one for one in order if one in alike and one != reference))
    if preference.alone:
        sharing: Collection[str] = ()
    elif preference.version == reference:
        sharing = preference.followed
    else:
        sharing = names if known.rolled_out else ()
    return VersionLine(names, frozenset({reference, *(one for one in sharing if one in alike)}))


def default_shares(line: VersionLine, served: Mapping[str, VersionTargets]) -> dict[str, float]:
    """Return the share of requests for each version that gets any.

    Args:
        served: by version of the line: the targets that serve it now.
    """
    by_targets = shares_by_version({one: served[one] for one in line.names if one in served})
    first = next((one for one in line.names if one in line.sharing and any(served.get(one, ()))), "")
    if not first:  # what has a share is not served just now: the next in line is the default
        first = next((one for one in line.names if any(served.get(one, ()))), "")
    if not first:
        return {}
    own = {one: share for one, share in by_targets.items() if one in line.sharing and one != first}
    rest = 1.0 - sum(own.values())
    return {first: rest, **own} if rest > _NOTHING else own


def default_version(line: VersionLine, served: Mapping[str, VersionTargets]) -> str:
    """Return the version that most requests get: what an operator means by the present default."""
    shares = default_shares(line, served)
    return max(line.names, key=lambda one: shares.get(one, 0.0))  # of equal shares the first
