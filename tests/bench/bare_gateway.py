"""A gateway that nobody watches, for `observability_overhead`: no observers, no flight recorder, no console.

A gateway cannot be configured like this: OIP's statistics and explanations of requests are parts of what it is. So the
parts are taken out here, where they are put in.
"""

from __future__ import annotations

from typing import Any

import gateway.app
import gateway.serving.dispatcher
from gateway import cli
from gateway.core.history.recorder import AnswerRecord, RequestEvent
from gateway.serving.execution import RequestExecution
from gateway.telemetry import Telemetry


class Unwatched(Telemetry):
    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.observers.clear()
        self.trace_sampler = None


class Unremembered(RequestExecution):
    __slots__ = ()

    def _remember(self, end: AnswerRecord | str, now: float) -> str:
        return ""

    def _note(self, note: RequestEvent) -> None:
        pass


def main() -> None:
    gateway.app.Telemetry = Unwatched  # type: ignore[attr-defined]
    gateway.serving.dispatcher.RequestExecution = Unremembered  # type: ignore[attr-defined]
    cli.gateway()


if __name__ == "__main__":
    main()
