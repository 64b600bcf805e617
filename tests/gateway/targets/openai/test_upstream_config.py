"""What may be configured of a server of another maker, and what its tokens cost."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from gateway.config.targets import TargetConfig
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.fleet.pricing import TokenPrice
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import variant_misfit
from tidegate.fleet.offers import ModelOffer, VariantOffer

SECTION: dict[str, Any] = {"models": {"a": "b"}}
LOCAL = "http://127.0.0.1:8000/v1"


def target(**keys: Any) -> TargetConfig:
    return TargetConfig(**{"name": "up", "transport": "openai", "address": LOCAL, "openai": SECTION, **keys})


@pytest.mark.parametrize(("keys", "words"), [
    ({"openai": None}, "go together"),
    ({"transport": "link"}, "go together"),
    ({"models": ("a",)}, "openai.models"),
    ({"foreign": True}, "openai.models"),
    ({"address": "host:8000"}, "no URL of an OpenAI server"),
    ({"address": "ftp://host/v1"}, "no URL of an OpenAI server"),
    ({"address": "https://me:secret@host/v1"}, "the key is in openai.api_key_file"),
    ({"address": "https://host/v1?key=1"}, "without a query"),
    ({"openai": {"models": {}}}, "openai.models"),
    ({"openai": {**SECTION, "api_key_env": "A", "api_key_file": "b"}}, "one of them"),
    ({"openai": {**SECTION, "api_key_env": "A"}, "address": "http://host/v1"}, "plain_text_key"),
    ({"openai": {**SECTION, "input_price": -1}}, "input_price"),
])  # fmt: skip
def test_a_mistake_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        target(**keys)


def test_a_key_may_go_to_this_machine_over_tls_or_where_the_operator_says_so() -> None:
    key = {**SECTION, "api_key_env": "A"}
    for address, section in (
        (LOCAL, key),
        ("https://host/v1", key),
        ("http://host/v1", {**key, "plain_text_key": True}),
    ):
        assert target(address=address, openai=section).spec.transport == "openai"


def test_tokens_are_priced_in_seconds_of_a_pool() -> None:
    section = {**SECTION, "input_price": 0.5, "output_price": 2.0, "pool_price": 3.6}
    price = target(openai=section).spec.token_price  # 3.6 an hour is 0.001 a second
    assert price == pytest.approx((0.0005, 0.002))
    assert price.of(1000, 100) == pytest.approx(0.7)
    assert target().spec.token_price.is_free


def test_a_generation_costs_its_tokens_where_they_are_paid_for() -> None:
    fleet = Fleet(lambda _model, _version: "tokens")
    view = fleet.add(TargetSpec("pool/up", "pool", LOCAL, "openai", token_price=TokenPrice(0.001, 0.002)), 0.0)
    assert view.token_cost(100, 50) == pytest.approx(0.2)
    fleet.price_cloud(3.0)
    assert view.token_cost(100, 50) == pytest.approx(0.6)  # as dear as the cloud


@pytest.mark.parametrize(("asked", "grades"), [
    ({}, {"ids", "prefill", "text"}), ({"ids": True}, {"ids"}), ({"begun": True}, {"ids", "prefill"}),
])  # fmt: skip
def test_a_grade_bounds_what_a_variant_is_asked(asked: dict[str, bool], grades: set[str]) -> None:
    ask = Ask("a", "1", 1.0, 1, 1, deadline=1.0, **asked)  # type: ignore[arg-type]
    one = VariantOffer("v", "bf16", slots=4)
    fitting = {grade for grade in ("ids", "prefill", "text") if not variant_misfit(replace(one, grade=grade), ask)}
    assert fitting == grades


def test_offers_of_all_grades_travel_as_before() -> None:
    fleet = Fleet(lambda _model, _version: "tokens")
    fleet.add(TargetSpec("pool/up", "pool", LOCAL, "openai", foreign=True), 0.0)
    offer = ModelOffer("a", "1", (VariantOffer("v", "bf16", grade="text"),), upstream="ollama: it is")
    fleet.fold(LinkUp("pool/up", "up", 0, (offer,)), 0.0)
    assert [one.variant.grade for one in fleet.offered("a", "1")] == ["text"]
