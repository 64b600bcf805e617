"""This module writes the frames of the link stream as bytes and reads them back into our own types.

A frame is serialized as an Envelope that holds only this frame. Protobuf joins messages by concatenating their bytes,
so an Envelope of many frames is `b"".join(frames)`: the outbox coalesces frames that are ready at the same moment
without encoding them again (`outbox.py`).

The other side is untrusted. Everything that no correct peer can send is a `ProtocolViolation` and ends the stream; it
never costs more than the one Envelope that carried it. Durations travel as unsigned microseconds; a duration that does
not fit (negative, infinite, NaN) is written as the nearest one that does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from google.protobuf.message import DecodeError

from tidegate.fleet.offers import ModelOffer, decode_offers, encode_offers
from tidegate.link.origin import Origin, printable, route_of, write_route
from tidegate.oip.grpc.message_bounds import check_envelope
from tidegate.outcome import ServeError, error_from_code
from tidegate.rpc import link_pb2
from tidegate.token_sink import TokenBatch, TopLogprob
from tidegate.types import Accepted, LoadReport, Route

PROTOCOL = 1  # what a Hello is written in, and what every side speaks
TOKENS_SINCE = 2  # the first protocol with streams of tokens
ORIGINS_SINCE = 3  # the first one by which a gateway asks another one
NEWEST = 3
# In one Envelope. An outbox fills one to 256 KiB; parsed, the two bytes of an empty frame take fifty.
MAX_FRAMES = 2**16
MAX_BOOT = 64
MAX_OFFERS_BYTES = 4 * 1024 * 1024
_MAX_MICROS = 2**53  # exact as a float, and 285 years
_MAX_UINT32 = 2**32 - 1


class ProtocolViolation(Exception):
    """The other side sent what the protocol forbids, so the stream is closed, whatever else it carried."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first frame of each side: its name, epoch, version and offers."""

    name: str
    epoch: int
    agent_version: str
    offers: tuple[ModelOffer, ...] = ()
    boot: str = ""  # identifies this start of the process; "" where it does not say
    uptime_s: float = 0.0  # since that start
    protocol: int = NEWEST  # the newest that the side speaks


class AnswerFrame(NamedTuple):  # one comes with every request: a frozen dataclass takes five times as long to make
    """One answer with its OIP message still serialized; the caller of `LinkClient.ask` parses it."""

    message: bytes
    queue_s: float
    compute_s: float
    batch_size: int
    variant: str
    load: LoadReport | None
    batch_wait_s: float = 0.0
    route: Route | None = None  # of a site: its own route to the place that answered
    request_id: str = ""  # of a gateway that was asked: its id of the request
    attested: str = ""  # and the evidence that the answer rests on, if it was required


def parse(envelope: bytes) -> Iterable[link_pb2.Frame]:
    """The frames of one Envelope. Raises ProtocolViolation."""
    if not check_envelope(envelope, MAX_FRAMES):
        raise ProtocolViolation(f"more than {MAX_FRAMES} frames in one Envelope, or none that can be read")
    try:
        return link_pb2.Envelope.FromString(envelope).frames
    except DecodeError as exc:
        raise ProtocolViolation(f"{len(envelope)} bytes that are no Envelope") from exc


# Writing: each returns the bytes of an Envelope with one frame.


def hello(greeting: Greeting) -> bytes:
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().hello
    frame.protocol = PROTOCOL
    frame.newest = greeting.protocol
    frame.name = greeting.name
    frame.epoch = greeting.epoch
    frame.agent_version = greeting.agent_version
    frame.offers = encode_offers(greeting.offers) if greeting.offers else b""
    if greeting.boot:
        frame.boot, frame.uptime_ms = greeting.boot, round(1e3 * greeting.uptime_s)
    return envelope.SerializeToString()


def request(
    id: int,
    message: bytes,
    *,
    budget_s: float,
    priority: int,
    variant: str,
    traceparent: str,
    tracestate: str = "",
    chunked_bytes: int = 0,
    window: int = 0,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    origin: Origin | None = None,
) -> bytes:
    """A request frame. A spent budget is written as 1 µs, since 0 on the wire means that there is no budget."""
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().request
    frame.id = id
    frame.budget_us = max(1, _micros(budget_s))
    if priority:
        frame.priority = _uint32(priority)
    if variant:
        frame.variant = variant
    if traceparent:
        frame.traceparent = traceparent
    if tracestate:
        frame.tracestate = tracestate
    if window:
        frame.window = window
    if ttft_s is not None:
        frame.ttft_us = max(1, _micros(ttft_s))
    if tpot_s is not None:
        frame.tpot_us = max(1, _micros(tpot_s))
    if origin is not None:
        origin.write_to(frame.origin)
    if chunked_bytes:
        frame.chunked_bytes = chunked_bytes
    else:
        frame.message = message
    return envelope.SerializeToString()


def accepted(id: int, ack: Accepted) -> bytes:
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().accepted
    frame.id = id
    frame.queue_ahead = _uint32(ack.queue_ahead)
    frame.finish_in_us = _micros(ack.finish_in_s)
    return envelope.SerializeToString()


def answer(id: int, answered: AnswerFrame, *, chunked_bytes: int = 0) -> bytes:
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().answer
    frame.id = id
    frame.queue_us = _micros(answered.queue_s)
    frame.compute_us = _micros(answered.compute_s)
    if answered.batch_wait_s:
        frame.batch_wait_us = _micros(answered.batch_wait_s)
    frame.batch_size = _uint32(answered.batch_size)
    frame.variant = answered.variant
    if answered.route is not None:
        write_route(frame.served_by, answered.route)
        frame.served_by.request_id, frame.served_by.attested = answered.request_id, answered.attested
    if answered.load is not None:
        _write_load(frame.load, answered.load)
    if chunked_bytes:
        frame.chunked_bytes = chunked_bytes
    else:
        frame.message = answered.message
    return envelope.SerializeToString()


def refused(id: int, error: ServeError, load: LoadReport | None) -> bytes:
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().refused
    frame.id = id
    frame.code = error.code
    frame.message = error.message
    if error.retry_after_s is not None:
        frame.retry_after_us = max(1, _micros(error.retry_after_s))
    if load is not None:
        _write_load(frame.load, load)
    return envelope.SerializeToString()


def cancel(id: int) -> bytes:
    envelope = link_pb2.Envelope()
    envelope.frames.add().cancel.id = id
    return envelope.SerializeToString()


def load(report: LoadReport, offers: bytes = b"") -> bytes:
    """A load frame with `offers` as `encode_offers` wrote them; empty if they did not change."""
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().load
    _write_load(frame, report)
    frame.offers = offers
    return envelope.SerializeToString()


def ping(sent_at_s: float) -> bytes:
    envelope = link_pb2.Envelope()
    envelope.frames.add().ping.sent_at_us = _micros(sent_at_s)
    return envelope.SerializeToString()


def pong(sent_at_us: int) -> bytes:
    """A pong frame, which echoes the other side's own clock unread."""
    envelope = link_pb2.Envelope()
    envelope.frames.add().pong.sent_at_us = sent_at_us
    return envelope.SerializeToString()


def chunk(id: int, piece: bytes) -> bytes:
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().chunk
    frame.id = id
    frame.data = piece
    return envelope.SerializeToString()


def started(id: int, prompt_tokens: int, cached_tokens: int) -> bytes:
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().started
    frame.id = id
    frame.prompt_tokens, frame.cached_tokens = _uint32(prompt_tokens), _uint32(cached_tokens)
    return envelope.SerializeToString()


def tokens(batches: Iterable[tuple[int, TokenBatch]]) -> bytes:
    """The frames of tokens that are ready at the same moment, of any generations: (id, batch) each."""
    envelope = link_pb2.Envelope()
    add = envelope.frames.add
    for id, batch in batches:
        frame = add().tokens
        frame.id = id
        frame.first = batch.first
        frame.ids.extend(batch.ids)
        if batch.logprobs:
            frame.logprobs.extend(batch.logprobs)
        for place in batch.top:
            likely = frame.likely.add()
            likely.ids.extend([one.id for one in place])
            likely.logprobs.extend([one.logprob for one in place])
    return envelope.SerializeToString()


def credit(id: int, count: int) -> bytes:
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().credit
    frame.id = id
    frame.tokens = _uint32(count)
    return envelope.SerializeToString()


def goodbye(reason: str) -> bytes:
    envelope = link_pb2.Envelope()
    envelope.frames.add().goodbye.reason = reason
    return envelope.SerializeToString()


def challenge(nonce: bytes) -> bytes:
    envelope = link_pb2.Envelope()
    envelope.frames.add().challenge.nonce = nonce
    return envelope.SerializeToString()


def evidence(proof: bytes, refusal: str = "") -> bytes:
    """An evidence frame. `refusal` is the reason if there is no evidence; the proof is then empty."""
    envelope = link_pb2.Envelope()
    frame = envelope.frames.add().evidence
    frame.proof = proof
    frame.refusal = refusal
    return envelope.SerializeToString()


# Reading: from a frame's message back to our types.


def greeting_of(frame: link_pb2.Hello) -> Greeting:
    """The greeting in a Hello. Raises ProtocolViolation for another protocol version, or fields that do not fit."""
    if frame.protocol != PROTOCOL:
        raise ProtocolViolation(f"link protocol {frame.protocol}; this side speaks {PROTOCOL}")
    if len(frame.boot) > MAX_BOOT:
        raise ProtocolViolation(f"a boot of {len(frame.boot)} characters; at most {MAX_BOOT}")
    offers = offers_of(frame.offers)
    protocol = max(PROTOCOL, frame.newest)
    return Greeting(
        frame.name, frame.epoch, frame.agent_version, offers, frame.boot, frame.uptime_ms / 1e3, protocol=protocol
    )


def offers_of(raw: bytes) -> tuple[ModelOffer, ...]:
    """The offers in a frame. Raises ProtocolViolation if they are too large, cannot be decoded or cannot be true."""
    if len(raw) > MAX_OFFERS_BYTES:
        raise ProtocolViolation(f"offers of {len(raw)} bytes; at most {MAX_OFFERS_BYTES}")
    try:
        return decode_offers(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolViolation(f"offers that cannot be read: {exc}") from exc


def accepted_of(frame: link_pb2.Accepted) -> Accepted:
    return Accepted(frame.queue_ahead, frame.finish_in_us / 1e6)


def answered_of(frame: link_pb2.Answer, message: bytes) -> AnswerFrame:
    """An answer from its frame and its message, which is apart because it may have come in chunks."""
    report = load_of(frame.load) if frame.HasField("load") else None
    of_gateway = frame.served_by if frame.HasField("served_by") else None
    return AnswerFrame(
        message=message,
        queue_s=frame.queue_us / 1e6,
        compute_s=frame.compute_us / 1e6,
        batch_size=frame.batch_size,
        variant=frame.variant,
        load=report,
        batch_wait_s=min(frame.queue_us, frame.batch_wait_us) / 1e6,  # the batch wait is a part of the queue time
        route=None if of_gateway is None else route_of(of_gateway),
        request_id="" if of_gateway is None else printable(of_gateway.request_id),
        attested="" if of_gateway is None else printable(of_gateway.attested, allowed=";"),
    )


def token_batch_of(frame: link_pb2.Tokens) -> TokenBatch:
    """The tokens in a frame. Raises ProtocolViolation if it speaks of more or fewer places than it has tokens."""
    # A slice is read at once, a tuple of the field number by number; and nearly always one field is all there is.
    ids = tuple(frame.ids[:])
    logprobs = tuple(frame.logprobs) if frame.logprobs else ()
    top = tuple([_likely_of(place) for place in frame.likely]) if frame.likely else ()
    if not ids or len(logprobs) not in (0, len(ids)) or len(top) not in (0, len(ids)):
        raise ProtocolViolation(f"{len(ids)} tokens with {len(logprobs)} logprobs and {len(top)} places")
    return TokenBatch(frame.first, ids, logprobs, top)


def _likely_of(place: link_pb2.Likely) -> tuple[TopLogprob, ...]:
    if len(place.ids) != len(place.logprobs):
        raise ProtocolViolation(f"{len(place.ids)} likely tokens with {len(place.logprobs)} logprobs")
    return tuple(map(TopLogprob, place.ids, place.logprobs))


def error_of(frame: link_pb2.Refused) -> ServeError:
    retry_after_s = frame.retry_after_us / 1e6 if frame.retry_after_us else None
    return error_from_code(frame.code, frame.message, retry_after_s=retry_after_s)


def load_of(frame: link_pb2.Load) -> LoadReport:
    return LoadReport(frame.epoch, frame.sequence, frame.queued, frame.in_flight, frame.queue_delay_us / 1e6)


def _write_load(frame: link_pb2.Load, report: LoadReport) -> None:
    frame.epoch = report.epoch
    frame.sequence = report.sequence
    frame.queued = _uint32(report.queued)
    frame.in_flight = _uint32(report.in_flight)
    frame.queue_delay_us = _micros(report.queue_delay_s)


def _micros(seconds: float) -> int:
    if 0.0 <= seconds < 1e9:  # False for NaN as well
        return int(seconds * 1e6)
    return _MAX_MICROS if seconds > 0 else 0


def _uint32(number: int) -> int:
    return number if 0 <= number <= _MAX_UINT32 else min(max(number, 0), _MAX_UINT32)
