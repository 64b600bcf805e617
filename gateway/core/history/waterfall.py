"""A waterfall shows where one request's time went: stages that add up, and its attempts side by side.

The path is what its caller waited for, from the first byte to the end:

    admit     reading, decoding, and being let in          classify   how much work it is
    place     where to go                                  before     until the attempt that counts was launched: others
                                                                      were under way, or no target was there yet
    link out · queue · batch wait · compute · link back    of the attempt whose answer was given
    unanswered                                             in the place of those: an attempt that brought nothing
    finish    from that answer to the caller's end         provisional ones are held back for a better one

Queue and compute of an attempt are as the target reported them, and the link is the rest. No clocks are compared, so
the two ways of a link cannot be distinguished: out is taken as half of the accept-ack's round trip, and back is what is
left, the target's own handling of the answer included. A target that says less (a foreign server) has its time as one
stage, `target`.

If a target claims more than the attempt took, what does not fit is its own line, `unaccounted`, and negative: stages
are never stretched to fit. So Σ stages + unaccounted = elapsed, always, and `unaccounted` says how far to trust them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.core.history.recorder import RequestEvent, RequestRecord

_ROUNDING_S: Final = 1e-9


class WaterfallStage(NamedTuple):
    name: str
    start_s: float  # from the request's arrival
    took_s: float
    words: str = ""


class AttemptBar(NamedTuple):
    """One attempt, from its launch to its end."""

    attempt: int
    target: str
    variant: str
    why: str
    start_s: float
    took_s: float
    end: str  # answered, failed, cancelled, or "" where the request ended first
    words: str = ""
    predicted_s: float = 0.0
    stages: tuple[WaterfallStage, ...] = ()


class Waterfall(NamedTuple):
    path: tuple[WaterfallStage, ...]
    bars: tuple[AttemptBar, ...]
    elapsed_s: float
    unaccounted_s: float


def waterfall(record: RequestRecord) -> Waterfall:
    bars = tuple([_bar(record, note) for note in record.notes if note.what == "launched"])
    path = [stage for stage in _path(record, bars) if stage.took_s > _ROUNDING_S or stage.took_s < -_ROUNDING_S]
    accounted_s = sum([stage.took_s for stage in path])
    return Waterfall(tuple(path), bars, record.elapsed_s, record.elapsed_s - accounted_s)


def _path(record: RequestRecord, bars: tuple[AttemptBar, ...]) -> list[WaterfallStage]:
    arrived_at = record.arrived_at
    taken_s, asked_s = record.taken_at - arrived_at, record.asked_at - arrived_at
    placed_s = record.placed_at - arrived_at
    path = [
        WaterfallStage("admit", 0.0, taken_s),
        WaterfallStage("classify", taken_s, asked_s - taken_s),
        WaterfallStage("place", asked_s, placed_s - asked_s),
    ]
    counts = _counting(record, bars)
    if counts is None:
        path.append(WaterfallStage("held", placed_s, record.elapsed_s - placed_s, "nobody was there to ask"))
        return path
    path.append(WaterfallStage("before", placed_s, counts.start_s - placed_s, _before(counts, bars)))
    path += counts.stages
    end_s = counts.start_s + counts.took_s
    words = "held back for a better one" if record.answer is not None and record.answer.route.provisional else ""
    path.append(WaterfallStage("finish", end_s, record.elapsed_s - end_s, words))
    return path


def _counting(record: RequestRecord, bars: tuple[AttemptBar, ...]) -> AttemptBar | None:
    """The attempt that the caller's time went by: whose answer was given, else the last one."""
    answer = record.answer
    if answer is not None:
        return next((bar for bar in bars if bar.attempt == answer.attempt), None)
    return bars[-1] if bars else None


def _before(counts: AttemptBar, bars: tuple[AttemptBar, ...]) -> str:
    earlier = [bar for bar in bars if bar.attempt < counts.attempt]
    return ", ".join(f"attempt {bar.attempt + 1} at {bar.target} {bar.end or 'was under way'}" for bar in earlier)


def _bar(record: RequestRecord, launched: RequestEvent) -> AttemptBar:
    number = launched.attempt
    own = [note for note in record.notes if note.attempt == number and note.at >= launched.at]
    acked_at = next((note.at for note in own if note.what == "accepted"), None)
    end = next((note for note in own if note.what in ("answered", "failed", "cancelled")), None)
    start_s = launched.at - record.arrived_at
    took_s = (end.at if end else record.ended_at) - launched.at
    way_s = None if acked_at is None else 0.5 * (acked_at - launched.at)
    stages = (
        _answered(end, start_s, took_s, way_s) if end and end.what == "answered" else _silent(start_s, took_s, way_s)
    )
    return AttemptBar(
        attempt=number,
        target=launched.target,
        variant=launched.variant,
        why=record.reasons[number] if number < len(record.reasons) else "",
        start_s=start_s,
        took_s=took_s,
        end=end.what if end else "",
        words=end.words if end else "",
        predicted_s=launched.seconds,
        stages=tuple(stages),
    )


def _answered(note: RequestEvent, start_s: float, took_s: float, way_s: float | None) -> list[WaterfallStage]:
    reported, link_s = note.stages or {}, note.seconds
    out_s = min(0.5 * link_s if way_s is None else way_s, link_s)
    out_words = "half of the link's share" if way_s is None else "half of the accept-ack's round trip"
    parts = [("link out", out_s, out_words)]
    if "compute" in reported:
        queue_s, batch_s = reported.get("queue", 0.0), reported.get("batch_wait", 0.0)
        parts += [("queue", queue_s - batch_s, ""), ("batch wait", batch_s, ""), ("compute", reported["compute"], "")]
    else:
        parts.append(("target", took_s - link_s, "it tells no stage times"))
    parts.append(("link back", link_s - out_s, "with the target's own handling"))
    return _one_after_another(parts, start_s)


def _silent(start_s: float, took_s: float, way_s: float | None) -> list[WaterfallStage]:
    if way_s is None:
        return _one_after_another([("unanswered", took_s, "not even an accept-ack came")], start_s)
    parts = [
        ("link out", way_s, "half of the accept-ack's round trip"),
        ("unanswered", took_s - way_s, "it was accepted"),
    ]
    return _one_after_another(parts, start_s)


def _one_after_another(parts: list[tuple[str, float, str]], start_s: float) -> list[WaterfallStage]:
    stages = []
    for name, took_s, words in parts:
        stages.append(WaterfallStage(name, start_s, took_s, words))
        start_s += took_s
    return stages
