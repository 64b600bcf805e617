"""The help lines are the gateways and neighbours that this device may ask for help, each over a stream of its own.

The gateways are those that the device could dial as well (`edge_agent/fleet/dialling.py`): configured, or heard of over
MQTT, MOST_GATEWAYS at most. Neighbours are configured by name (`help.neighbours`). One task compares them with the
lines once a second. `ask` sends a request by one of them and reports to that line's breaker and times what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Self

import structlog
from msgspec.structs import replace

from edge_agent.core.help.help_choice import HelpingPeer, able_peers, first_peer
from edge_agent.core.help.help_counts import HelpCounts, HelpReason
from edge_agent.help.help_line import HelpLine
from edge_agent.help.noted_tokens import NotedTokens
from tidegate import clock
from tidegate.link.client import ROOM_BYTES
from tidegate.link.frames import Greeting
from tidegate.link.link_inference import infer_over_link
from tidegate.link.origin import Origin
from tidegate.models.manifest import Manifest
from tidegate.oip.request_constraints import DEFER_KEY, VERSION_KEY
from tidegate.outcome import BadAnswer, DeadlineExceeded, Outcome, Overloaded, ServeError, Unreachable
from tidegate.runtime.owned_task import OwnedTask
from tidegate.security.tls import Dialler
from tidegate.token_sink import TokenObjectives, TokenSink
from tidegate.trace_context import PARENT_KEY, STATE_KEY
from tidegate.types import Call, InferRequest, Reply, Route

LOOK_S: Final = 1.0
MOST_GATEWAYS: Final = 4
MOST_NEIGHBOURS: Final = 16
DEVICE_TIER: Final = "edge/"
log = structlog.get_logger(__name__)

DiallerOf = Callable[[str, str], Dialler | None]


class HelpLines:
    """`async with` keeps a line to each gateway until its end.

    Args:
        device: "edge/NAME".
        greeting: what this device says of itself.
        gateways: address → name, "" where that is not known; read at each look.
        neighbours: address → "edge/NAME"; read at each look.
        dialler_of: opens the channel to an address, which answers as that name; None: it cannot be dialled.
        key: API key for gateways that require one; "": none.
        draw: chance, uniform in [0, 1).
    """

    def __init__(
        self,
        device: str,
        greeting: Callable[[], Greeting],
        *,
        gateways: Callable[[], Mapping[str, str]],
        neighbours: Callable[[], Mapping[str, str]] = dict,
        dialler_of: DiallerOf,
        key: str,
        draw: Callable[[], float],
        max_message_bytes: int,
    ) -> None:
        self.counts = HelpCounts()
        self._device = device
        self._greeting = greeting
        self._gateways = gateways
        self._neighbours = neighbours
        self._dialler_of = dialler_of
        self._key = key
        self._draw = draw
        self._max_message_bytes = max_message_bytes
        self._lines: dict[str, HelpLine] = {}
        self._task = OwnedTask(self._keep_looking, name="help lines")

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        lines, self._lines = self._lines, {}
        for line in lines.values():
            await line.close()

    @property
    def up(self) -> bool:
        """Whether any peer takes questions."""
        return any(line.client is not None for line in self._lines.values())

    def seen(self, model: str, now: float) -> list[HelpingPeer]:
        """The peers as they are known for a request to this model, by address."""
        return [line.seen(model, now) for line in self._lines.values()]

    def manifest(self, name: str, version: str = "") -> Manifest | None:
        """The manifest of a model with which a peer helps now; of one that generates none is used."""
        for line in self._lines.values():
            manifest = line.manifest(name, version)
            if manifest is not None and manifest.generative is None:
                return manifest
        return None

    def told(self, now: float) -> list[dict[str, object]]:
        """The state of each line, for people, with the models for which it would be asked first."""
        lines = dict(self._lines)
        models = sorted({model for line in lines.values() for model in line.models})
        first: dict[str, list[str]] = {address: [] for address in lines}
        for model in models:
            peer = first_peer(
                able_peers("", [line.seen(model, now) for line in lines.values() if model in line.models])
            )
            if peer is not None:
                first[peer.name].append(model)
        return [{**line.told(now), "asked_first_for": first[address]} for address, line in lines.items()]

    async def ask(
        self, address: str, call: Call, deadline: float, because: HelpReason, *, credential: str = ""
    ) -> Reply:
        """A peer's answer, which says who helped. Raises ServeError.

        Args:
            address: of the peer, as `seen` names it.
            deadline: an instant; what is left of it when the frame is written is the budget there.
            credential: what the caller showed, "Bearer KEY|TOKEN", for a gateway; no neighbour sees it. "": nothing.
        """
        line, model = self._lines.get(address), call.request.model_name
        client = None if line is None else line.client
        if line is None or client is None:
            raise Unreachable("the link to it is lost")
        if line.neighbour is not None:
            credential = ""
        line.breaker.asking()
        self.counts.in_flight += 1
        began_at, ended = clock.now(), Outcome.CANCELLED.value
        try:
            reply = await infer_over_link(
                client,
                _as_sent(call),
                variant=call.variant,
                budget_s=deadline - began_at,
                priority=call.priority,
                traceparent=call.headers.get(PARENT_KEY, ""),
                tracestate=call.headers.get(STATE_KEY, ""),
                on_accepted=call.on_accepted or _unheard,
                tokens=_noted(call, line.name),
                objectives=_objectives(call, began_at),
                origin=Origin.of(call, self._device, began_at, credential),
            )
            ended = Outcome.OK.value
        except ServeError as error:
            ended = error.code
            self._learn(line, model, error, began_at, deadline, is_own=not credential)
            raise
        finally:
            self.counts.in_flight -= 1
            self.counts.requests[because, ended] += 1
            if ended == Outcome.CANCELLED.value:
                line.breaker.left()
        took_s = clock.now() - began_at
        line.answered(model, took_s, reply.stages.get("queue", 0.0), clock.now())
        if reply.load is not None:
            line.loaded(reply.load, None)
        self.counts.seconds += took_s
        log.debug("helped", model=model, by=line.name, because=because, took_ms=round(took_s * 1e3, 1))
        return _helped(reply, line.name, because, began_at - call.arrived_at, took_s, deadline)

    def _learn(
        self, line: HelpLine, model: str, error: ServeError, began_at: float, deadline: float, *, is_own: bool
    ) -> None:
        """A refusal, also that its targets failed, is an answer; a stream that ended is none, and so is long silence.

        Args: is_own: it was asked on the device's own rights, so that a lack of room concerns the whole device.
        """
        now = clock.now()
        is_silent = isinstance(error, DeadlineExceeded) and now >= deadline
        is_patient = now - began_at >= line.times.patience_s(model)
        if is_silent:
            line.times.silent(model, now - began_at)
        if is_silent and not is_patient:
            line.breaker.left()
        elif is_silent or line.client is None or isinstance(error, BadAnswer):
            line.breaker.unanswered(now)
        else:
            has_no_room = is_own and isinstance(error, Overloaded)
            line.breaker.answered(now, (error.retry_after_s or 0.0) if has_no_room else 0.0)

    async def _keep_looking(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("cannot look for peers that help")  # a defect must not end the task for good
            await clock.sleep_until_tick(LOOK_S)

    async def _look(self) -> None:
        near = dict(list(self._neighbours().items())[:MOST_NEIGHBOURS])
        wanted = {**dict(list(self._gateways().items())[:MOST_GATEWAYS]), **near}
        for address in self._lines.keys() - wanted.keys():
            await self._lines.pop(address).close()
        for address in wanted.keys() - self._lines.keys():
            dialler = self._dialler_of(address, wanted[address])
            if dialler is not None:
                self._lines[address] = HelpLine(
                    address,
                    dialler,
                    self._greeting,
                    draw=self._draw,
                    key="" if address in near else self._key,
                    max_message_bytes=self._max_message_bytes + ROOM_BYTES,
                    neighbour=near.get(address, ""),
                )
        able = able_peers("", self.seen("", clock.now()))
        self.counts.neighbours = sum(one.is_neighbour for one in able)
        self.counts.gateways = len(able) - self.counts.neighbours

    def __repr__(self) -> str:
        return f"<HelpLines {list(self._lines.values())}>"


def is_neighbours(reply: Reply) -> bool:
    """Whether it is a neighbour's answer, which nobody has judged yet."""
    return reply.helped_by.startswith(DEVICE_TIER)


def _as_sent(call: Call) -> InferRequest:
    """The request with the demands that travel in no field of a frame, and without what only this device reads."""
    request, said = call.request, dict(call.request.parameters)
    said.pop(DEFER_KEY, None)
    if (version := call.headers.get(VERSION_KEY, "").strip()) and VERSION_KEY not in said:
        said[VERSION_KEY] = version
    return request if said == request.parameters else replace(request, parameters=said)


def _noted(call: Call, gateway: str) -> TokenSink | None:
    """The call's tokens, of which the first says who helps: which target it is the answer's end says."""
    if call.tokens is None or (on_begun := call.on_begun) is None:
        return call.tokens
    return NotedTokens(call.tokens, lambda: on_begun(Route(gateway, "helped", call.variant)))


def _objectives(call: Call, now: float) -> TokenObjectives | None:
    """What is left for the first token, and for each further one; None of what is no generation."""
    if call.ttft_s is None and call.tpot_s is None:
        return None
    first_s = None if call.ttft_s is None else max(0.0, call.ttft_s - (now - call.arrived_at))
    return TokenObjectives(first_s, call.tpot_s)


def _helped(reply: Reply, peer: str, because: HelpReason, admit_s: float, took_s: float, deadline: float) -> Reply:
    """The reply as this device gives it: with who helped and why, and its own times."""
    inner = reply.route or Route("", "", reply.variant)
    queue_s, compute_s = reply.stages.get("queue", 0.0), reply.stages.get("compute", 0.0)
    stages = {"admit": admit_s, "queue": queue_s, "link": max(0.0, took_s - queue_s - compute_s), "compute": compute_s}
    return replace(
        reply,
        stages=stages,
        route=replace(inner, served_by=inner.served_by or peer, reason="helped"),
        helped_by=f"{peer}; because={because}; chosen={inner.reason or '-'}",
        budget_left_s=deadline - clock.now(),
        load=None,
    )


def _unheard(_accepted: object) -> None:
    """For a caller that does not ask how long it will take."""
