"""The local host serves this device's local callers: it decides about unsure answers, and defers requests.

Behind a gateway an unsure answer escalates to a better variant. A local caller has no gateway, so the manifest decides
what it gets (`confidence.unsure`):

    accept   the answer, declared: `provisional=1` in `tidegate-route`
    reject   503 with a time to come back
    defer    202 with a ticket: a gateway computes it once one is reachable, and the answer comes back to this device

Where the device may ask a gateway for help (`edge_agent/help`) it does so first, for an unsure answer as for any
refusal: the above is what follows where no gateway helped.

A caller that sends `tidegate-defer: 1` accepts a ticket instead of any refusal for lack of room, time or a worker, and
instead of an unsure answer. A pinned request stays where it is: it is never deferred, its unsure answer is only
declared. The same holds for a demanded variant, of which there is no better.

A ticket is given when the request is on the disk, never before. Where that is impossible, the refusal names the reason.
Calls that a gateway passes on are left alone: the gateway judges their answers itself.

An unreachable model (its worker is gone) is reported to a local caller as NothingAlive: the same code as at a gateway,
so that a caller that fails over between device and gateway keeps its rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from msgspec.structs import replace

from edge_agent.help.help_lines import is_neighbours
from edge_agent.help.helping_host import HelpingHost
from edge_agent.offline.queue_db import StoredItem
from edge_agent.offline.store import OfflineStore
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.host_around import HostAround
from tidegate import clock
from tidegate.fleet.stored import MAX_BODY_BYTES, Kind
from tidegate.models.confidence import ConfidenceMeasure
from tidegate.models.manifest import Manifest, Unsure
from tidegate.oip.budget import BUDGET_HEADER
from tidegate.oip.call import GATEWAY_HOP, HOP_KEY
from tidegate.oip.grpc.codec import message_from_request, message_from_response
from tidegate.oip.reply import reply_parameters
from tidegate.oip.request_constraints import ATTESTED, DEFER_KEY, MIN_QUALITY_KEY, REQUIRE_KEY, VARIANT_KEY
from tidegate.oip.sequence import sequence_of
from tidegate.oip.token_budgets import TPOT_HEADER, TTFT_HEADER
from tidegate.outcome import (
    CapacityError,
    Deferred,
    ModelNotFound,
    NothingAlive,
    NotSupported,
    Overloaded,
    PeerError,
    ServeError,
    TooLarge,
    Unreachable,
)
from tidegate.placement_pin import stricter
from tidegate.storage.database import DatabaseFull, DatabaseUnavailable
from tidegate.types import Call, InferRequest, Parameter, Reply

LOOK_AGAIN_S: Final = 5.0  # for a ticket
UNSURE_AGAIN_S: Final = 30.0
RESULT_PRIORITY: Final = 2
_PRIORITIES: Final = {1: 9, 2: 7, 3: 5, 4: 3}  # OIP's, 1 the highest, as the store's, 9 the highest
# A caller's own deadline ends when it has its ticket.
_NOT_KEPT: Final = ("timeout", DEFER_KEY, BUDGET_HEADER, TTFT_HEADER, TPOT_HEADER)


class OfflinePolicy(Protocol):
    """Decides whether and how entries are kept."""

    store: OfflineStore | None
    forwards: str  # which results: none, unsure, all

    def why_not(self) -> str:
        """Why nothing can be deferred on this device; "" where it can."""
        ...

    def stored(self) -> None: ...

    def ttl_s(self, kind: Kind) -> float: ...


class LocalHost(HostAround[EdgeHost | HelpingHost]):
    """A `ModelHost` for local callers.

    Args:
        keeper: the policy for deferred and forwarded entries.
        on_gateway: called when a gateway's call comes this way.
        helping: answers with the help of gateways; None: the device answers alone.
    """

    def __init__(
        self,
        host: EdgeHost,
        keeper: OfflinePolicy,
        *,
        on_gateway: Callable[[], None] = lambda: None,
        helping: HelpingHost | None = None,
    ) -> None:
        self._own = host
        self._helping = helping
        super().__init__(helping or host)
        self._keeper = keeper
        self._on_gateway = on_gateway
        self._judges: dict[tuple[str, str], tuple[Manifest, ConfidenceMeasure | None]] = {}

    def most_rows(self, call: Call, enough: int) -> int | None:
        """As `EdgeHost.most_rows`: what a peer takes besides is not known."""
        return self._own.most_rows(call, enough)

    async def infer(self, call: Call, credential: str = "") -> Reply:
        """The answer, or the outcome that the model's policy sets for an unsure one.

        Args: credential: what the caller showed, for a gateway that helps; "": nothing.

        Raises:
            Deferred: the request is kept; carries the ticket.
            NothingAlive: no model here is sure enough, or the model has no worker.
            ServeError: as `EdgeHost.infer`; or why the request could not be kept.
        """
        if call.headers.get(HOP_KEY) == GATEWAY_HOP:
            self._on_gateway()
            return await self._own.infer(call)
        began_at = clock.now()
        # Before the answer: a rollout may switch or remove the model while it is computed.
        manifest = self._found(call, call.request.model_version)
        try:
            helping = self._helping
            reply = await (self._own.infer(call) if helping is None else helping.infer(call, credential))
        except (CapacityError, PeerError) as error:
            if call.defer and manifest is not None and _may_leave(call, manifest):
                raise await self._defer(call, manifest, "", error.message) from error
            if isinstance(error, Unreachable):
                raise NothingAlive(error.message, retry_after_s=error.retry_after_s or 1.0) from error
            raise
        if reply.helped_by and not is_neighbours(reply):  # the gateway has judged it
            return reply
        reply = replace(reply, stages={"admit": began_at - call.arrived_at, **reply.stages})
        answered_by = reply.response.model_version
        if manifest is None or answered_by != manifest.version:  # it was switched before it began
            manifest = self._found(call, answered_by)
        doubt = "" if manifest is None else self._doubt(call, manifest, reply)
        if manifest is not None and doubt:
            better = await self._better(call, manifest, reply, credential)
            if better is not None:
                return better
            reply = await self._unsure(call, manifest, reply, doubt)
        if self._keeper.forwards == "all" or (doubt and self._keeper.forwards == "unsure"):
            await self._forward(reply)
        return reply

    def _found(self, call: Call, version: str) -> Manifest | None:
        """The manifest of the model in this version; None where it is not here (any more)."""
        try:
            return self._host.manifest(call.request.model_name, version)
        except ModelNotFound:
            return None

    def _doubt(self, call: Call, manifest: Manifest, reply: Reply) -> str:
        """Why the answer is unsure; "" where it is sure, or where that is unknown."""
        key = manifest.name, manifest.version
        known = self._judges.get(key)
        if known is None or known[0] is not manifest:  # it may be rolled out anew with other content
            how = manifest.confidence
            known = self._judges[key] = manifest, None if how is None else ConfidenceMeasure(manifest, how)
        judge = known[1]
        if judge is None or manifest.confidence is None:
            return ""
        confidence = judge.confidence(reply.variant, call.request.outputs, reply.response.outputs)
        if confidence is None or confidence >= manifest.confidence.threshold:
            return ""
        return f"model {manifest.name!r} is sure by {confidence:.2f}, below {manifest.confidence.threshold:g}"

    async def _better(self, call: Call, manifest: Manifest, reply: Reply, credential: str) -> Reply | None:
        """A gateway's answer instead of an unsure one; None where there is none, or the caller wants this variant."""
        if self._helping is None or call.variant or reply.helped_by:  # it was sent once already
            return None
        return await self._helping.better(call, reply, manifest, credential)

    async def _unsure(self, call: Call, manifest: Manifest, reply: Reply, doubt: str) -> Reply:
        policy = _policy(call, manifest)
        if policy == "reject":
            raise NothingAlive(f"{doubt}, and no better variant is here", retry_after_s=UNSURE_AGAIN_S)
        if policy == "defer":
            raise await self._defer(call, manifest, reply.variant, doubt)
        assert reply.route is not None
        return replace(reply, route=replace(reply.route, provisional=True))

    async def _defer(self, call: Call, manifest: Manifest, variant: str, why: str) -> ServeError:
        """Store the request; the error to raise, with the ticket or with the reason why there is none."""
        store = self._keeper.store
        if store is None or self._keeper.why_not():
            return NotSupported(f"{why}; it cannot be deferred: {self._keeper.why_not()}")
        body = message_from_request(to_keep(call, manifest.version)).SerializeToString()
        if len(body) > MAX_BODY_BYTES:
            return TooLarge(f"{why}; it cannot be deferred: {len(body)} bytes, at most {MAX_BODY_BYTES} can be kept")
        step = sequence_of(call.request.parameters)
        item = StoredItem(
            id=store.new_id(),
            kind="request",
            body=body,
            priority=_PRIORITIES.get(call.priority, 5),
            ttl_s=self._keeper.ttl_s("request"),
            key="" if step is None else f"{manifest.name}/{step.id}"[:128],
            model=manifest.name,
            version=manifest.version,
            variant=variant,
            promised=True,
        )
        try:
            await store.put(item)
        except DatabaseUnavailable as error:
            again_s = UNSURE_AGAIN_S if isinstance(error, DatabaseFull) else LOOK_AGAIN_S
            return Overloaded(f"{why}; it cannot be deferred: {error}", retry_after_s=again_s)
        self._keeper.stored()
        return Deferred(f"{why}; ask later for the ticket {item.id}", retry_after_s=LOOK_AGAIN_S, ticket=item.id)

    async def _forward(self, reply: Reply) -> None:
        """Keep the answer for a gateway. If it cannot be kept the store counts it, and the caller has its answer."""
        store, response = self._keeper.store, reply.response
        if store is None:
            return
        body = message_from_response(response, reply_parameters(reply)).SerializeToString()
        if len(body) > MAX_BODY_BYTES:
            store.refused["too_large"] += 1
            return
        item = StoredItem(
            id=store.new_id(),
            kind="result",
            body=body,
            priority=RESULT_PRIORITY,
            ttl_s=self._keeper.ttl_s("result"),
            key=f"results/{response.model_name}"[:128],
            model=response.model_name,
            version=response.model_version,
            variant=reply.variant,
        )
        try:
            await store.put(item)
        except DatabaseUnavailable:
            return
        self._keeper.stored()

    def __repr__(self) -> str:
        return f"<LocalHost {self._host!r}>"


def _policy(call: Call, manifest: Manifest) -> Unsure:
    if call.variant or not _may_leave(call, manifest):
        return "accept"
    return "defer" if call.defer or manifest.confidence is None else manifest.confidence.unsure


def _may_leave(call: Call, manifest: Manifest) -> bool:
    return stricter(call.pin, manifest.pin) == "any"


def to_keep(call: Call, version: str) -> InferRequest:
    """The request with its demands as parameters, since headers are not kept."""
    kept: dict[str, Parameter] = {
        name: value for name, value in call.request.parameters.items() if name not in _NOT_KEPT
    }
    if call.variant:
        kept[VARIANT_KEY] = call.variant
    if call.min_quality:
        kept[MIN_QUALITY_KEY] = call.min_quality
    if call.attested:
        kept[REQUIRE_KEY] = ATTESTED
    return replace(call.request, model_version=version, parameters=kept)
