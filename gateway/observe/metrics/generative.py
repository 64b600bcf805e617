"""OpenAI's routes in OpenTelemetry's words: `gen_ai.*`, under the names that its mapping to Prometheus gives them.

A dashboard made for any OpenAI-compatible server then shows this one too. One HTTP request is one operation, however
many calls it became. Tokens are those that were embedded, after truncation; an embedding has no output tokens.

Source: OpenTelemetry semantic conventions for generative AI metrics, v1.41 (in development), and "Prometheus and
OpenMetrics compatibility": dots become underscores, the unit `s` becomes `_seconds`, `{token}` is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from tidegate.metrics.families import histogram
from tidegate.metrics.histogram import Histogram

OPERATION: Final = "embeddings"
PROVIDER: Final = "tidegate"
TOKENS: Final = tuple(4.0**power for power in range(14))  # 1 to 67108864, as the conventions say
SECONDS: Final = tuple(0.01 * 2**power for power in range(14))  # 0.01 to 81.92
_LABELS: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class GenerativeCounts:
    """Mutable: `embedded` for each request that was answered, `failed` for each that was not."""

    def __init__(self) -> None:
        self._tokens: dict[str, Histogram] = {}  # by model
        self._seconds: dict[tuple[str, str], Histogram] = {}  # by model and error, "" for none

    def embedded(self, model: str, tokens: int, took_s: float) -> None:
        self._tokens.setdefault(model, Histogram(TOKENS)).observe(tokens)
        self._took(model, "", took_s)

    def failed(self, model: str, error: str, took_s: float) -> None:
        """Args: model: "" where the caller named none of ours; error: an outcome's word."""
        self._took(model, error, took_s)

    def _took(self, model: str, error: str, took_s: float) -> None:
        found = self._seconds.get((model, error))
        if found is None:
            found = self._seconds[model, error] = Histogram(SECONDS)
        found.observe(took_s)

    def families(self) -> Iterator[Metric]:
        yield histogram(
            "gen_ai_client_token_usage",
            "Tokens of a request, by type.",
            (*_LABELS, "gen_ai_token_type"),
            (((OPERATION, PROVIDER, model, "input"), one) for model, one in self._tokens.items()),
        )
        durations = [((OPERATION, PROVIDER, model, error), one) for (model, error), one in self._seconds.items()]
        words = "From a request's arrival to its answer."
        labels = (*_LABELS, "error_type")
        yield histogram("gen_ai_client_operation_duration_seconds", words, labels, durations)
        yield histogram("gen_ai_server_request_duration_seconds", words, labels, durations)

    def __repr__(self) -> str:
        return f"<GenerativeCounts of {len(self._tokens)} models>"
