"""All that a gateway counts, in one object: an observer of the stack and of request records, and a source of scrapes.

    requests     how they ended, stage times, deadlines      counted as they end        requests.py
    attempts     predictions, hedges, fallbacks, targets     from their records         attempts.py
    generative   OpenAI's routes in OpenTelemetry's words    counted as they end        generative.py
    generation   tokens, first tokens                     counted as they end        generation.py
    targets      breakers, links, queues, ages               read from the fleet view   targets.py
    admission    admission, tenants, quarantine              read where they are kept   admission.py

Other parts of the gateway add their own families with `add`; every name stands in docs/observability.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric

from gateway.core.admission.admission import Admission
from gateway.core.admission.quarantine import Quarantine
from gateway.core.estimate.token_calibration import TokenCalibration
from gateway.core.fleet.fleet import Fleet
from gateway.core.history.recorder import RequestRecord
from gateway.observe.metrics.admission import admission_families
from gateway.observe.metrics.attempts import AttemptCounts
from gateway.observe.metrics.generation import GenerationCounts
from gateway.observe.metrics.generative import GenerativeCounts
from gateway.observe.metrics.requests import RequestCounts
from gateway.observe.metrics.targets import TimelineOf, target_families
from tidegate import clock
from tidegate.metrics.families import gauge, single
from tidegate.oip.host import ModelStatistics
from tidegate.outcome import ServeError
from tidegate.types import InferRequest

MOST_TARGETS = 100


class GatewayMetrics:
    """An `Observer` of the stack, and what `Exposition` collects.

    Args:
        most_targets: how many targets have series of their own.
        suppressed_hedges: so far, for lack of budget.
        calibration_error: how far the chances that placement claims are from what comes; None where it claims none.
        token_calibration: the same of generations.
        before_reading: called before each scrape, so that what is still to be reported is counted in it.
        timeline_of: the console's timeline of a target, where there is a console.
    """

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        *,
        version_of: Callable[[InferRequest], str],
        quarantine: Quarantine | None = None,
        most_targets: int = MOST_TARGETS,
        suppressed_hedges: Callable[[], int] = lambda: 0,
        calibration_error: Callable[[], float] | None = None,
        token_calibration: TokenCalibration | None = None,
        before_reading: Callable[[], None] = lambda: None,
        timeline_of: TimelineOf = lambda _target_id: None,
    ) -> None:
        self.requests = RequestCounts(version_of)
        self.attempts = AttemptCounts(most_targets, suppressed_hedges)
        self.generative = GenerativeCounts()
        self.generation = GenerationCounts()
        self._fleet = fleet
        self._admission = admission
        self._quarantine = quarantine or Quarantine()
        self._most_targets = most_targets
        self._calibration_error = calibration_error
        self._token_calibration = token_calibration
        self._before_reading = before_reading
        self._timeline_of = timeline_of
        self._sources: list[Callable[[], Iterable[Metric]]] = []
        # Bound here: each request calls them.
        self.began = self.requests.began
        self.answered = self.requests.answered
        self.ended = self.requests.ended

    def landed(self, record: RequestRecord) -> None:
        """A request has its end, and its record."""
        self.attempts.landed(record)

    def refused(self, protocol: str, model: str, error: ServeError) -> None:
        """A request that a protocol refused before it became a call."""
        self.requests.refused(protocol, model, error)

    def statistics(self, name: str, version: str) -> ModelStatistics:
        """The statistics of one model version, from zero if it never served."""
        return self.requests.statistics(name, version)

    def add(self, source: Callable[[], Iterable[Metric]]) -> None:
        """Families of another part of the gateway, made at each scrape."""
        self._sources.append(source)

    def collect(self) -> Iterator[Metric]:
        self._before_reading()
        yield from self.requests.families()
        yield from self.attempts.families(self._fleet.targets.keys())
        if self._calibration_error is not None:
            words = "Mean gap between the chances that were claimed and what came, 0 to 1."
            yield single("tidegate_chance_calibration_error_ratio", words, self._calibration_error())
        if self._token_calibration is not None:
            errors = self._token_calibration.errors()
            words = "The same of generations: of the first token in time, of the next ones, and of the whole."
            yield gauge("tidegate_token_chance_calibration_error_ratio", words, ("chance",), errors)
        yield from target_families(self._fleet, self._timeline_of, self._most_targets, clock.now())
        yield from admission_families(self._admission, self._quarantine)
        yield from self.generative.families()
        yield from self.generation.families()
        for source in self._sources:
            yield from source()

    def __repr__(self) -> str:
        return f"<GatewayMetrics {self.requests.total} requests>"
