"""An ask carries what an answer is worth: by its tenant and by its model."""

from __future__ import annotations

import pytest

from gateway.core.fleet.fleet import Fleet
from gateway.serving.work_estimate import AskBuilder
from tests.gateway.layers.test_layers import call
from tests.tidegate.models.test_validate import MANIFEST
from tidegate.models.share_weights import ShareWeights


@pytest.mark.parametrize(("weights", "weight"), [({}, 2.0), ({"text": 3.0}, 6.0), ({"image": 3.0}, 2.0)])
def test_an_answer_is_worth_its_tenant_s_weight_times_its_model_s(weights: dict[str, float], weight: float) -> None:
    fleet = Fleet(lambda _name, _version: "tokens", draw=lambda: 0.5)
    subject = AskBuilder(lambda _name, _version: MANIFEST, fleet, lambda _tenant: 2.0, ShareWeights(weights))
    assert subject.ask(call(deadline=10.0)).weight == weight
