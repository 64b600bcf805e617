"""A fallback model stands in for another one where no target answers that in time: the last rung of degradation.

A manifest names it (`fallback_model`). Its caller sends the same tensors and reads the same ones, so both models must
be interchangeable by their manifests (`alike.py`). Only one step is taken: what stands in has no substitute of its own.
Manifests that name each other in a circle are refused all the same, since one of them must be wrong.

Pure. It can be wrong where two models agree in their tensors and mean different things: an embedding of another model
is no neighbour of the first one's, so that a fallback model suits classifiers, and not an index of vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tidegate.models.alike import differences
from tidegate.models.manifest import Manifest


def fallback_problems(manifests: Iterable[Manifest]) -> Iterator[str]:
    """What is wrong with the fallback models that these name, as `MODEL VERSION: fallback_model: what`.

    Args:
        manifests: the highest version of each model last. A fallback model that is not among them is no problem: it
            may come later.
    """
    every = tuple(manifests)
    latest = {one.name: one for one in every}
    names = {one.name: one.fallback_model for one in every if one.fallback_model}
    for one in every:
        other = latest.get(one.fallback_model)
        where = f"{one.name} {one.version}: fallback_model: {one.fallback_model!r}"
        if one.fallback_model == one.name:
            yield f"{where} is the model itself; name another one, or leave the key out"
        elif circle := _circle(one.name, names):
            yield f"{where} makes a circle ({' -> '.join(circle)}); leave the key out of one of them"
        elif other is not None and (apart := differences(one, other)):
            yield f"{where} differs in {', '.join(apart)}; only a model that takes and gives the same can stand in"


def _circle(start: str, names: Mapping[str, str]) -> list[str]:
    """The way from a model back to it; empty where it has an end."""
    way = [start]
    while (following := names.get(way[-1])) is not None and following not in way:
        way.append(following)
    return [*way, start] if following == start else []
