"""Generations in OpenTelemetry's words: tokens in and out, the time to the first token and of each further one.

Whatever protocol a generation came by: these are counted from answers, as `tidegate_requests` is. An answer that came
in one piece has no first token, and its time is in `tidegate_request_seconds` like that of any other.

Source: OpenTelemetry semantic conventions for generative AI metrics, v1.41 (in development), with their bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, TypeVar

from prometheus_client.metrics_core import Metric

from gateway.observe.metrics.generative import PROVIDER, TOKENS
from tidegate.generate.budgets_kept import budgets_kept, each_token_s
from tidegate.generate.usage import Usage, usage_if_generated
from tidegate.metrics.families import counter, histogram
from tidegate.metrics.histogram import Histogram
from tidegate.outcome import CallerError
from tidegate.types import Call, Reply

OPERATION: Final = "generate_content"
FIRST_TOKEN_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LABELS: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")

K = TypeVar("K")


class GenerationCounts:
    """An `Observer` of the stack: counts the generations among the answers."""

    def __init__(self) -> None:
        self._usage: dict[tuple[str, str], Histogram] = {}  # by model and type of token
        self._tokens: Counter[tuple[str, str, str]] = Counter()  # by model, tier and type of token
        self._first: dict[str, Histogram] = {}  # by model
        self._further: dict[str, Histogram] = {}
        self._budgets: Counter[tuple[str, str, str]] = Counter()  # by model, budget and result

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        usage = usage_if_generated(reply.response)
        if usage is not None:
            self._count(call, reply, usage, now)

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        """What had come until then is not known here: with a budget for its tokens it has missed one of the three."""
        is_ours = isinstance(error, Exception) and not isinstance(error, CallerError)
        if is_ours and (call.ttft_s is not None or call.tpot_s is not None):
            self._budgets[call.request.model_name, "all", "missed"] += 1

    def _count(self, call: Call, reply: Reply, usage: Usage, now: float) -> None:
        model, tier = call.request.model_name, reply.route.served_by.partition("/")[0] if reply.route else ""
        for kind, count in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
            _of(self._usage, (model, kind), TOKENS).observe(count)
            self._tokens[model, tier, kind] += count
        if usage.cached_tokens:
            self._tokens[model, tier, "cached"] += usage.cached_tokens
        self._count_budgets(call, reply, usage, now)
        if reply.first_token_s is None:
            return
        _of(self._first, model, FIRST_TOKEN_S).observe(reply.first_token_s)
        further_s = each_token_s(reply.first_token_s, now - call.arrived_at, usage.completion_tokens)
        if further_s is not None:
            _of(self._further, model, PER_TOKEN_S).observe(further_s)

    def _count_budgets(self, call: Call, reply: Reply, usage: Usage, now: float) -> None:
        if call.ttft_s is None and call.tpot_s is None:
            return
        kept = budgets_kept(call, reply.first_token_s, now - call.arrived_at, usage.completion_tokens)
        for budget, result in (*kept._asdict().items(), ("all", kept.all)):
            if result is not None:
                self._budgets[call.request.model_name, budget, "kept" if result else "missed"] += 1

    def families(self) -> Iterator[Metric]:
        if not self._usage and not self._budgets:
            return
        yield histogram(
            "gen_ai_server_token_usage",
            "Tokens of a generation, by type.",
            (*_LABELS, "gen_ai_token_type"),
            (((OPERATION, PROVIDER, model, kind), one) for (model, kind), one in self._usage.items()),
        )
        yield histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's arrival to the first token of its answer.",
            _LABELS,
            (((OPERATION, PROVIDER, model), one) for model, one in self._first.items()),
        )
        yield histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of an answer's tokens after the first.",
            _LABELS,
            (((OPERATION, PROVIDER, model), one) for model, one in self._further.items()),
        )
        yield counter(
            "tidegate_tokens",
            "Tokens of generations, by where they were answered: input, cached (a part of input) and output.",
            ("model", "tier", "type"),
            self._tokens.items(),
        )
        yield counter(
            "tidegate_token_budgets",
            "Requests with a budget for tokens: those of the first, of the next ones, of the whole, and of all three.",
            ("model", "budget", "result"),
            self._budgets.items(),
        )

    def __repr__(self) -> str:
        return f"<GenerationCounts of {len(self._first)} models>"


def _of(found: dict[K, Histogram], key: K, bounds: tuple[float, ...]) -> Histogram:
    if key not in found:
        found[key] = Histogram(bounds)
    return found[key]
