"""Reconciliation compares the desired documents with what is committed, and returns the device's next action.

Documents. Per scope, revisions only grow. A lower one is refused whatever key signed it, because a replayed old
document must not bring an old model back; the same revision with other bytes is refused too, because it is unknown
which of the two was meant. The same bytes again change nothing: retained documents come with every connection.

Models. One rollout at a time: a small device has memory for one generation beside the one that answers. The first wish
that differs from what is committed and was not tried under its revision is begun, in the order of names. What is
committed but was damaged on the disk since is not there to be served, so it is rolled out again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from edge_agent.core.rollout_machine import Rollout, S
from tidegate.rollout.desired import DesiredDocument, DesiredModel

Contents = Mapping[str, str]  # model → the content that is committed
Blocked = Mapping[str, Mapping[str, int]]  # content → scope → the revision up to which it is not tried again


@dataclass(frozen=True, slots=True)
class AcceptedRevision:
    """The revision and digest of a scope's accepted document."""

    revision: int
    digest: str


def refusal_reason(desired: DesiredDocument, digest: str, held: AcceptedRevision | None, *, scope: str) -> str:
    """Why a signed document is not accepted, "" when it is (again). `scope`: of the topic that it came on."""
    if desired.scope != scope:
        return f"scope: it is for {desired.scope}, but came to {scope}"
    if held is None or desired.revision > held.revision:
        return ""
    if desired.revision < held.revision:
        return f"revision: {desired.revision} is older than {held.revision}, which is in force"
    return "" if digest == held.digest else f"revision: {desired.revision} is in force with other content"


@dataclass(frozen=True, slots=True)
class BeginRollout:
    """Begin a rollout of this model."""

    model: str
    wish: DesiredModel


@dataclass(frozen=True, slots=True)
class SettleFulfilled:
    """Only note that the wish is fulfilled: the content is committed already."""

    model: str
    wish: DesiredModel


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """Remove the deployed generation of this model."""

    model: str
    wish: DesiredModel


Next = BeginRollout | SettleFulfilled | RemoveModel


def next_action(
    wishes: Mapping[str, DesiredModel],
    committed: Contents,
    records: Mapping[str, Rollout],
    blocked: Blocked,
    damaged: Collection[str] = (),
) -> Next | None:
    """The next action while no rollout is under way; None when there is none left.

    Args:
        damaged: committed contents whose files cannot be served.
    """
    for model, wish in sorted(wishes.items()):
        held, record = committed.get(model), records.get(model)
        if wish.plan is None:
            if held is not None or record is not None:
                return RemoveModel(model, wish)
            continue
        content = wish.plan.content
        if held == content and content not in damaged:
            if record is None or not _is_noted(record, wish):
                return SettleFulfilled(model, wish)
        elif wish.revision > blocked.get(content, {}).get(wish.scope, 0):
            return BeginRollout(model, wish)
    return None


def _is_noted(record: Rollout, wish: DesiredModel) -> bool:
    said = (record.scope, record.revision) == (wish.scope, wish.revision)
    return said and record.state is S.COMMITTED and record.plan == wish.plan


def is_still_wanted(rollout: Rollout, wishes: Mapping[str, DesiredModel]) -> bool:
    """Whether the documents still ask for the rollout's content, or no longer mention its model."""
    wish = wishes.get(rollout.model)
    return wish is None or (wish.plan is not None and wish.plan.content == rollout.content)


def with_newest_rules(rollout: Rollout, wishes: Mapping[str, DesiredModel]) -> Rollout:
    """The rollout under the newest rules for the same content; a wish for other content leaves it unchanged."""
    wish = wishes.get(rollout.model)
    if wish is None or wish.plan is None or wish.plan.content != rollout.content:
        return rollout
    return replace(rollout, plan=wish.plan, scope=wish.scope, revision=wish.revision, urls=wish.urls)
