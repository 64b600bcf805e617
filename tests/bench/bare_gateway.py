"""A gateway that nobody watches, for `observability_overhead`: no observers, no flight recorder, no console.

A gateway cannot be configured like this: OIP's statistics and explanations of requests are parts of what it is. So the
parts are taken out here, where they are put in.
"""

from __future__ import annotations

from typing import Any

import gateway.app
from gateway import cli
from gateway.core.history.recorder import AnswerRecord
from gateway.serving.execution import RequestExecution
from gateway.telemetry import Telemetry


class Unwatched(Telemetry):
    def __init__(self, config: Any, dispatcher: Any, *args: Any) -> None:
        super().__init__(config, dispatcher, *args)
        self.observers.clear()
        self.trace_sampler = None


def forget(_flight: RequestExecution, _end: AnswerRecord | str, _now: float) -> str:
    return ""


def note_nothing(_flight: RequestExecution, *_note: Any) -> None:
    pass


def main() -> None:
    gateway.app.Telemetry = Unwatched  # type: ignore[misc]
    RequestExecution._remember = forget  # type: ignore[method-assign]
    RequestExecution._note = note_nothing  # type: ignore[method-assign]
    cli.gateway()


if __name__ == "__main__":
    main()
