"""Whether two versions of a model may stand in for one another.

A caller that names no version may be answered by either of two versions only if it could not tell them apart by what
it must send and what it gets: the same tensors, axes, text, work and demands, and no state of its own at either.

Pure. It can be wrong where two versions agree in all of that and mean different things by it.
"""

from __future__ import annotations

from typing import Final

from tidegate.models.manifest import Manifest

_SHARED: Final = ("inputs", "outputs", "axes", "text", "cost", "pin", "require", "generative")


def differences(one: Manifest, other: Manifest) -> tuple[str, ...]:
    """The keys of their manifests that keep them apart; none if either may answer for the other."""
    apart = tuple(key for key in _SHARED if getattr(one, key) != getattr(other, key))
    return apart if one.sequence is other.sequence is None else (*apart, "sequence")


def interchangeable(one: Manifest, other: Manifest) -> bool:
    """Whether a caller of either may be answered by the other."""
    return not differences(one, other)
