"""The helping host answers a local caller's request with the device's own models, or has a peer answer it.

    predict → here, or a peer first
            → what is not answered here when it should be: a peer beside it, and the first answer counts
            → what was refused here: a peer after all
            → the answer, or one refusal

`edge_agent/core/help/help_choice.py` decides, each time with what is left of the budget; this file performs. A request
is sent once at most. A caller who leaves takes the question along: the gateway frees its place, the target its queue.

A peer, a gateway or a neighbour, is asked for what the device refused for lack of room, time, a worker, a fitting
variant or the model itself; never for what broke a model, nor for what its caller did wrong. The refusal of both is
one: the device's own with the peer's words behind it, or, where the device can never answer such a request, the peer's
kind, for it says whether trying again may help.

Never sent: a request that caller or model pins, a step of a sequence (its state is here), a generation of which tokens
have come, a prompt in words (the wire has token ids), and what a gateway or a neighbour has sent here. Requests of
neighbours do not even come this way (`neighbour_host.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any, Final

from msgspec.structs import replace

from edge_agent.core.help.help_choice import (
    HelpChoice,
    HelpLimits,
    HelpNeed,
    able_peers,
    ask_after_s,
    choose_place,
)
from edge_agent.core.help.help_counts import NOT_ASKED, HelpReason
from edge_agent.help.help_lines import HelpLines
from edge_agent.help.noted_tokens import NotedTokens
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.host_around import HostAround
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.oip.call import GATEWAY_HOP, HOP_KEY
from tidegate.oip.sequence import sequence_of
from tidegate.outcome import (
    CallerError,
    CapacityError,
    DeadlineExceeded,
    ModelNotFound,
    NothingAlive,
    NotSupported,
    Overloaded,
    ServeError,
    Unreachable,
)
from tidegate.placement_pin import stricter
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.types import Call, Reply

LOST_AGAIN_S: Final = 1.0
RESERVE_SHARE, LEAST_RESERVE_S, MOST_RESERVE_S = 0.02, 0.002, 0.02  # of the budget, to give an answer that is there


class HelpingHost(HostAround[EdgeHost]):
    """A `ModelHost` over the device's own models, and over peers that help.

    It lists the device's own models: what a peer has besides may be gone with the link.

    Args:
        may_use: whether requests to a model of this name may be sent.
        unsure: whether gateways are asked for answers that the model here is not sure of.
    """

    def __init__(
        self,
        host: EdgeHost,
        lines: HelpLines,
        limits: HelpLimits,
        *,
        may_use: Callable[[str], bool],
        unsure: bool,
    ) -> None:
        super().__init__(host)
        self._lines = lines
        self._limits = limits
        self._may_use = may_use
        self._asks_unsure = unsure

    def manifest(self, name: str, version: str = "") -> Manifest:
        """The device's own, or that of a peer which helps now. Raises ModelNotFound."""
        try:
            return self._host.manifest(name, version)
        except ModelNotFound:
            found = self._lines.manifest(name, version) if self._may_use(name) else None
            if found is None:
                raise
            return found

    async def infer(self, call: Call, credential: str = "") -> Reply:
        """The answer, from here or through a gateway. Raises as `EdgeHost.infer`."""
        if not self._lines.up or call.headers.get(HOP_KEY) == GATEWAY_HOP:
            return await self._host.infer(call)
        manifest = self.manifest(call.request.model_name, call.request.model_version)
        turn = self._turn(call, manifest, _deadline(call, manifest), credential)
        here_s = self._host.finish_in_s(call, turn.deadline)
        is_late = here_s is not None and here_s > turn.deadline - clock.now()
        if here_s is not None and is_late and (choice := turn.choice(here_s, self._limits)).place == "peer":
            try:
                return await turn.ask(choice, "late")
            except ServeError as error:
                turn.refused(error)
        try:
            if here_s is None or call.tokens is not None or turn.stays or turn.has_asked:
                return await self._host.infer(turn.call)
            return await self._insured(turn, here_s)
        except (NotSupported, ModelNotFound, CapacityError, Unreachable) as error:
            if turn.has_begun:
                raise
            return await self._after(error, turn)

    async def _insured(self, turn: _HelpTurn, here_s: float) -> Reply:
        """The device's answer, or a peer's that was asked beside it when it did not come. Raises as `infer`."""
        after_s = turn.ask_after_s(here_s)
        own = asyncio.create_task(self._host.infer(turn.call), name="own answer")
        asked: asyncio.Task[Reply] | None = None
        try:
            await asyncio.wait((own,), timeout=None if after_s == inf else after_s)
            if not own.done() and (choice := turn.choice(inf, self._limits)).place == "peer":
                asked = asyncio.create_task(turn.ask(choice, "late"), name="peer's answer")
                await asyncio.wait((own, asked), return_when=asyncio.FIRST_COMPLETED)
                if not own.done() or own.exception() is not None:
                    try:
                        return await asked
                    except ServeError as error:
                        turn.refused(error)
            return await own
        finally:
            await cancel_and_wait(*[one for one in (own, asked) if one is not None])

    async def better(self, call: Call, reply: Reply, manifest: Manifest, credential: str = "") -> Reply | None:
        """A gateway's answer instead of this unsure one; None where it is not to be had in time.

        Args: manifest: of the version that answered, which may be gone by now.
        """
        floor = manifest.better_than(reply.variant)
        if not self._asks_unsure or not floor or call.tokens is not None:
            return None
        deadline = _deadline(call, manifest)
        left_s = deadline - clock.now()
        deadline -= min(MOST_RESERVE_S, max(LEAST_RESERVE_S, RESERVE_SHARE * left_s))
        asked = replace(call, min_quality=max(call.min_quality, floor))
        turn = self._turn(asked, manifest, deadline, credential)
        choice = turn.choice(inf, self._limits)
        if choice.place != "peer":
            self._lines.counts.requests["unsure", NOT_ASKED] += 1
            return None
        try:
            return await turn.ask(choice, "unsure")
        except ServeError:  # the unsure answer is still there
            return None

    async def _after(self, error: ServeError, turn: _HelpTurn) -> Reply:
        """What becomes of a request that was refused here."""
        because = _because(error)
        choice = turn.choice(inf, self._limits)
        if choice.place == "peer":
            try:
                return await turn.ask(choice, because)
            except ServeError as refused:
                turn.refused(refused)
        elif turn.refusal is None:
            self._lines.counts.requests[because, NOT_ASKED] += 1
            raise error
        assert turn.refusal is not None
        raise joint_refusal(error, turn.refusal, turn.whom) from error

    def _turn(self, call: Call, manifest: Manifest, deadline: float, credential: str) -> _HelpTurn:
        stays, gateways_only = self._stays(call, manifest), _gateways_only(call, manifest)
        return _HelpTurn(self._lines, call, deadline, stays, gateways_only, credential)

    def _stays(self, call: Call, manifest: Manifest) -> str:
        """Why a request may not leave the device; "" where it may."""
        request = call.request
        if call.path:
            return f"it came from {call.path[-1]}, and is not passed on"
        if (pin := stricter(call.pin, manifest.pin)) != "any":
            return f"it is pinned ({pin})"
        if not self._may_use(request.model_name):
            return f"requests to {request.model_name!r} do not leave this device (help.models)"
        if manifest.sequence is not None and sequence_of(request.parameters) is not None:
            return "it is a step of a sequence, whose state is here"
        return "its prompt is in words, and the wire has token ids" if request.text is not None else ""

    def __repr__(self) -> str:
        return f"<HelpingHost {self._host!r} {self._lines!r}>"


class _HelpTurn:
    """One request on its way: what was asked for it so far."""

    def __init__(
        self, lines: HelpLines, call: Call, deadline: float, stays: str, gateways_only: str, credential: str
    ) -> None:
        self.refusal: ServeError | None = None  # of the peer that was asked
        self.whom = ""
        self._gateways_only = gateways_only
        self.deadline = deadline
        self._lines = lines
        self.stays = stays
        self._credential = credential
        self.has_asked = False  # a peer
        self._begun = None if call.tokens is None else NotedTokens(call.tokens)
        self.call = call if self._begun is None else replace(call, tokens=self._begun)

    def refused(self, error: ServeError) -> None:
        """The peer that was asked has no answer."""
        self.refusal = error

    @property
    def has_begun(self) -> bool:
        """Whether tokens of an answer have come."""
        return self._begun is not None and self._begun.has_begun

    def ask_after_s(self, here_s: float) -> float:
        """Seconds until a peer is asked beside the device; inf: never."""
        now = clock.now()
        able = able_peers(self._gateways_only, self._lines.seen(self.call.request.model_name, now))
        took_s = min([one.took_s or 0.0 for one in able], default=inf)
        return ask_after_s(self.deadline - now, here_s, took_s or None)

    def choice(self, here_s: float, limits: HelpLimits) -> HelpChoice:
        request, now = self.call.request, clock.now()
        need = HelpNeed(
            left_s=self.deadline - now,
            here_s=here_s,
            size_bytes=sum([len(tensor.raw) for tensor in request.inputs]),
            stays=self.stays,
            asked=self.has_asked,
            gateways_only=self._gateways_only,
        )
        seen = self._lines.seen(request.model_name, now)
        return choose_place(need, seen, self._lines.counts.in_flight, limits)

    async def ask(self, choice: HelpChoice, because: HelpReason) -> Reply:
        self.has_asked = True
        self.whom = "a neighbour" if choice.is_neighbour else "a gateway"
        return await self._lines.ask(choice.peer, self.call, self.deadline, because, credential=self._credential)


def _deadline(call: Call, manifest: Manifest) -> float:
    """As the device's own queue has it."""
    return call.arrived_at + manifest.default_budget_s if call.deadline is None else call.deadline


def _gateways_only(call: Call, manifest: Manifest) -> str:
    """Why no neighbour is asked for a request; "" where one may be."""
    if call.attested or manifest.require == "attested":
        return "only a gateway verifies evidence"
    if call.min_quality > 0.0:
        return "only a gateway knows the quality of what others have"
    if call.tokens is not None or manifest.generative:
        return "neighbours do not generate for each other"
    return ""


def _because(error: ServeError) -> HelpReason:
    if isinstance(error, ModelNotFound):
        return "no-model"
    if isinstance(error, NotSupported):
        return "unfit"
    if isinstance(error, DeadlineExceeded):
        return "late"
    return "busy" if isinstance(error, Overloaded) else "down"


def joint_refusal(own: ServeError, peers: ServeError, whom: str = "a gateway") -> ServeError:
    """The one refusal of a request that the device refused, and a peer that was asked for it after or before."""
    message = f"{own.message}; {whom} was asked: {peers.message}"
    kind: type[Any] = type(own)
    again_s = own.retry_after_s
    if isinstance(own, CallerError) and not isinstance(peers, CallerError):
        # It is no fault of the caller that the device is small: a later try may find the peer well.
        is_lost = not isinstance(peers, CapacityError)
        kind, again_s = (NothingAlive, LOST_AGAIN_S) if is_lost else (type(peers), peers.retry_after_s)
    refusal: ServeError = kind(message, retry_after_s=again_s)
    return refusal
