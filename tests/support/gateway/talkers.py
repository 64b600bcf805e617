"""A dispatcher over fake targets that generate, for virtual time: they fail, stall, leave and talk late by a script.

Each token is a checksum of all tokens before it, as a paced engine's is: whoever goes on from the right ones goes on
rightly, and one token that is lost, doubled or of another place shows in all that follow.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.placement.placer import Placer
from gateway.core.request.handover import HandoverPolicy
from gateway.serving.dispatcher import Dispatcher
from tests.support.gateway.conductor import CountingTarget
from tests.support.gateway.fleets import spec
from tests.support.models.generative import TALKER
from tidegate import clock
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.generate.request import OUTPUT_IDS, GenerateRequest, generate_request, ids_tensor, infer_request
from tidegate.generate.usage import FinishReason, Usage, usage_parameters
from tidegate.models.manifest import Manifest
from tidegate.outcome import ServeError, Unreachable
from tidegate.token_sink import TokenBatch, TokenSink
from tidegate.types import Accepted, Call, InferRequest, InferResponse, Reply

STEP_S = 0.01
PACED = VariantOffer("paced", "none", ((1.0, STEP_S), (600.0, 600 * STEP_S)), max_tokens=512, slots=4)


class Mishap(NamedTuple):
    """What befalls one attempt, after so many of its own tokens."""

    what: Literal["", "fails", "stalls", "leaves"] = ""
    after: int = 0
    error: ServeError = Unreachable("killed")
    late: int = 0  # tokens that still come once it has ended


class Talker(CountingTarget):
    """Args:
    mishaps: of its attempts, in order; those after the last are well.
    salt: another one makes other tokens of the same beginning.
    logprobs: none where it gives none.
    """

    def __init__(
        self,
        id: str,
        mishaps: Iterable[Mishap] = (),
        *,
        step_s: float = STEP_S,
        salt: int = 0,
        logprobs: Sequence[float] = (),
    ) -> None:
        super().__init__(id)
        self.step_s = step_s
        self.logprobs = logprobs  # of its tokens, over and over, where they are asked for
        self.salt = salt
        self.mishaps = list(mishaps)
        self.asked: list[GenerateRequest] = []
        self.cancelled = 0
        self.leave: Callable[[], None] = lambda: None

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        asked = generate_request(request, default_max_tokens=64)
        self.asked.append(asked)
        mishap = self.mishaps.pop(0) if self.mishaps else Mishap()
        talk, sink = Talk(asked, self.tokens, self.salt, self.logprobs), self.tokens
        try:
            while talk.reason is None:
                if mishap.what and len(talk.ids) >= mishap.after:
                    await self._befalls(mishap)
                await clock.sleep(self.step_s)
                await talk.next()
            if mishap.what and len(talk.ids) <= mishap.after:  # its tokens are out, and the end is not
                await self._befalls(mishap)
        except asyncio.CancelledError:
            self.cancelled += 1
            talk.late(sink, mishap.late)
            raise
        except ServeError:
            talk.late(sink, mishap.late)
            raise
        usage = Usage(talk.reason, len(asked.prompt), len(talk.ids) + (talk.reason == "stop"))
        outputs = (ids_tensor(OUTPUT_IDS, tuple(talk.ids)),)
        answer = InferResponse(
            request.model_name, request.model_version, outputs, id=request.id, parameters=usage_parameters(usage)
        )
        return Reply(answer, stages={"queue": 0.0, "compute": STEP_S * len(talk.ids)}, variant=variant)

    async def _befalls(self, mishap: Mishap) -> None:
        if mishap.what == "fails":
            raise mishap.error
        if mishap.what == "stalls":
            await clock.sleep(1e6)
        self.leave()


class Talk:
    """One attempt's tokens, within its reader's credit."""

    def __init__(
        self, asked: GenerateRequest, sink: TokenSink | None, salt: int = 0, logprobs: Sequence[float] = ()
    ) -> None:
        self._salt = salt
        self._logprobs = () if asked.logprobs is None else logprobs
        self.ids: list[int] = []
        self.reason: FinishReason | None = None
        self._asked = asked
        self._sink = sink
        self._sum = zlib.crc32(struct.pack(f"<{len(asked.prompt)}i", *asked.prompt))
        self._credit = 10**6 if sink is None else sink.window
        self._more = asyncio.Event()
        if sink is not None:
            sink.on_credit(self._credited)
            sink.started(len(asked.prompt), 0)

    async def next(self) -> None:
        while len(self.ids) >= self._credit:
            self._more.clear()
            await self._more.wait()
        token = token_after(self._sum ^ self._salt)
        if token in TALKER.generative.stop_tokens:  # type: ignore[union-attr]
            self.reason = "stop"
            return
        self._sum = zlib.crc32(struct.pack("<i", token), self._sum)
        self.ids.append(token)
        if self._sink is not None:
            at = len(self.ids) - 1
            logprobs = (self._logprobs[at % len(self._logprobs)],) if self._logprobs else ()
            self._sink.put(TokenBatch(at, (token,), logprobs))
        if len(self.ids) >= self._asked.max_tokens:
            self.reason = "length"

    def late(self, sink: TokenSink | None, tokens: int) -> None:
        """Tokens that were on their way when it ended: at once, and a moment later."""
        if sink is None or not tokens:
            return
        for late in range(tokens):
            batch = TokenBatch(len(self.ids) + late, (900 + late,))
            asyncio.get_running_loop().call_later(late * STEP_S, sink.put, batch)

    def _credited(self, tokens: int) -> None:
        self._credit += tokens
        self._more.set()


def token_after(checksum: int) -> int:
    mixed = (checksum ^ checksum >> 15) * 0x9E3779B1 % 2**32
    return (mixed ^ mixed >> 13) % 200


def undisturbed(prompt: Sequence[int], max_tokens: int, salt: int = 0) -> list[int]:
    """The whole answer."""
    checksum, ids = zlib.crc32(struct.pack(f"<{len(prompt)}i", *prompt)), list[int]()
    while len(ids) < max_tokens and (token := token_after(checksum ^ salt)) not in (2,):
        checksum = zlib.crc32(struct.pack("<i", token), checksum)
        ids.append(token)
    return ids


class TalkScene:
    """A dispatcher over talkers that are all up. Args: offers: by target; PACED where none is given."""

    def __init__(
        self,
        *talkers: Talker,
        offers: dict[str, VariantOffer] | None = None,
        handovers: HandoverPolicy | None = None,
        manifest: Manifest = TALKER,
        overloaded: Callable[[], bool] = lambda: False,
    ) -> None:
        now = clock.now()
        self.manifest = manifest
        self.talkers = {talker.id: talker for talker in talkers}
        self.fleet = Fleet(lambda model, version: "tokens")
        for talker in talkers:
            self.fleet.add(spec(talker.id), now)
            self.is_up(talker.id, (offers or {}).get(talker.id, PACED))
            talker.leave = lambda id=talker.id: self.leaves(id)  # type: ignore[misc]
        self.dispatcher = Dispatcher(
            Placer(self.fleet),
            self.talkers,
            self._manifest,
            draw=lambda: 0.5,
            handovers=handovers,
            overloaded=overloaded,
        )

    def is_up(self, id: str, variant: VariantOffer = PACED) -> None:
        offer = ModelOffer("talker", "1", (variant,), digest=f"sha of {variant.name}")
        self.fleet.fold(LinkUp(id, id, 1, (offer,)), clock.now())

    def leaves(self, id: str) -> None:
        self.fleet.fold(LinkDown(id, "leaving: shutdown", True), clock.now())

    def _manifest(self, name: str, version: str) -> Manifest:
        return self.manifest

    def call(self, tokens: TokenSink | None, *, max_tokens: int = 40, budget_s: float = 60.0, **words: object) -> Call:
        now = clock.now()
        request = infer_request("talker", GenerateRequest((1, 2, 3), max_tokens), id="7")
        return replace(Call(request, "openai", now, now + budget_s), tokens=tokens, **words)

    def assert_at_rest(self) -> None:
        assert all(talker.under_way == 0 for talker in self.talkers.values())
        assert all(view.queue_estimate.in_flight == 0 for view in self.fleet.targets.values())
        assert "0 attempts in tasks of their own" in repr(self.dispatcher)
