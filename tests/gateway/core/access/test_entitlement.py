"""What an identity may: narrowed silently where less can be given, refused where nothing can stand in."""

from __future__ import annotations

import pytest

from gateway.core.access.entitlement import authorized_call
from tests.support.serving.hosts import echo_request
from tidegate.caller import Grant, Identity, Right, UsageLimits
from tidegate.outcome import Forbidden
from tidegate.placement_pin import Pin
from tidegate.types import Call


def call(*, priority: int = 0, pin: Pin = "any", tenant: str = "") -> Call:
    return Call(echo_request(), "oip-http", 1.0, priority=priority, pin=pin, tenant=tenant)


def somebody(**grant: object) -> Identity:
    return Identity("key:1", Grant("acme", **grant))  # type: ignore[arg-type]


def test_a_call_is_on_the_payers_budget_whoever_it_says_it_is() -> None:
    who = somebody()
    got = authorized_call(call(), who, "acme#key:1")
    assert (got.tenant, got.identity) == ("acme#key:1", who)
    assert authorized_call(call(tenant="acme"), who, "acme").tenant == "acme"


def test_another_tenant_may_be_named_by_who_may_act_for_others_only() -> None:
    rights: tuple[Right, ...] = ("infer", "act-for-others")
    with pytest.raises(Forbidden, match=r"key:1 is of tenant 'acme' and may not act for 'rival'"):
        authorized_call(call(tenant="rival"), somebody(), "acme")
    assert authorized_call(call(tenant="rival"), somebody(rights=rights), "acme").tenant == "rival"


@pytest.mark.parametrize(
    ("asked", "highest", "got"),
    [(0, 1, 0), (1, 1, 1), (0, 3, 3), (1, 2, 2), (2, 3, 3), (4, 3, 4), (9, 4, 4), (9, 2, 9)],
)
def test_priority_is_lowered_to_the_highest_that_is_granted(asked: int, highest: int, got: int) -> None:
    assert authorized_call(call(priority=asked), somebody(highest_priority=highest), "acme").priority == got


@pytest.mark.parametrize(
    ("asked", "granted", "got"),
    [("any", "any", "any"), ("any", "site", "site"), ("edge", "site", "edge"), ("site", "edge", "edge")],
)
def test_of_the_pin_that_is_asked_and_the_one_that_is_granted_the_stricter_counts(
    asked: Pin, granted: Pin, got: Pin
) -> None:
    assert authorized_call(call(pin=asked), somebody(pin=granted), "acme").pin == got


@pytest.mark.parametrize("grant", [{"models": ("other-*", "x")}, {"models": ()}, {"rights": ("admin",)}])
def test_a_model_or_a_right_that_is_not_granted_is_refused(grant: dict[str, object]) -> None:
    with pytest.raises(Forbidden):
        authorized_call(call(), somebody(**grant), "acme")


def test_globs_name_models_as_a_whole_and_by_their_letters() -> None:
    who = somebody(models=("mini*", "digits.v?", "a[bc]"))
    assert [who.may_use(name) for name in ("minilm", "digits.v2", "ab", "xminilm", "digits-v2", "MINILM", "a[bc]")] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip


def test_who_has_limits_of_its_own_pays_from_a_purse_of_its_own() -> None:
    assert somebody().payer == "acme"
    assert somebody(limits=UsageLimits(requests_per_s=1.0)).payer == "acme#key:1"
    assert repr(somebody()) == "<Identity key:1 of acme>"
