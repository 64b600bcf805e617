"""Share weights mean the same wherever a model's work meets another's."""

from __future__ import annotations

import msgspec
import pytest

from tests.tidegate.models.test_validate import MANIFEST
from tidegate.models.manifest import Manifest, Modality
from tidegate.models.share_weights import ShareWeights


def of_kind(modality: Modality) -> Manifest:
    return msgspec.structs.replace(MANIFEST, modality=modality)


@pytest.mark.parametrize(
    ("weights", "weight", "group"),
    [
        ({}, 1.0, MANIFEST.name),
        ({"sound": 2.0}, 1.0, MANIFEST.name),
        ({"image": 2.0}, 2.0, "image"),
        ({"image": 2.0, MANIFEST.name: 3.0}, 3.0, MANIFEST.name),
    ],
)
def test_a_model_has_its_own_weight_else_its_modality_s_else_one(
    weights: dict[str, float], weight: float, group: str
) -> None:
    subject = ShareWeights(weights)
    assert subject.of(of_kind("image")) == weight
    assert subject.group_of(of_kind("image")) == group
