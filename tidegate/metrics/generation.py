"""A target's generations as families, the same for edges and pools except for the prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from tidegate.metrics.families import counter, gauge, histogram
from tidegate.metrics.generated import GeneratedCounts, GeneratingState


def generation_families(prefix: str, counts: GeneratedCounts, states: Iterable[GeneratingState]) -> Iterator[Metric]:
    """Args: prefix: "tidegate_edge" or "tidegate_pool"."""
    words = "Tokens by type: input, cached (of the input), output, and wasted, whose answer nobody got."
    yield counter(f"{prefix}_tokens", words, ("model", "type"), counts.tokens.items())
    words = "From a request's arrival here to its first token."
    firsts = (((model,), one) for model, one in counts.first_token_s.items())
    yield histogram(f"{prefix}_first_token_seconds", words, ("model",), firsts)
    words = "Mean time between two tokens of an answer, without its reader's pauses."
    between = (((model,), one) for model, one in counts.token_s.items())
    yield histogram(f"{prefix}_token_seconds", words, ("model",), between)
    now = [((one.model, one.variant), one) for one in states]
    labels = ("model", "variant")
    running = [(names, float(one.running)) for names, one in now]
    yield gauge(f"{prefix}_sequences_running", "Generations that hold a slot.", labels, running)
    waiting = [(names, float(one.waiting)) for names, one in now]
    yield gauge(f"{prefix}_sequences_waiting", "Generations that wait for a slot.", labels, waiting)
    slots = [(names, float(one.slots)) for names, one in now]
    yield gauge(f"{prefix}_sequence_slots", "Generations that all workers take at a time.", labels, slots)
    reserved = [(names, float(one.reserved_bytes)) for names, one in now]
    yield gauge(f"{prefix}_cache_reserved_bytes", "Reserved for attention caches.", labels, reserved)
