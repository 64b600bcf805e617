"""A gateway that nobody watches, for `observability_overhead`: no observers, no flight recorder, no console.

A gateway cannot be configured like this: OIP's statistics and explanations of requests are parts of what it is. So the
parts are taken out here, where they are put in.
"""

from __future__ import annotations

from typing import Any

import gateway.app
from gateway import cli
from gateway.core.history.recorder import Given
from gateway.serving.execution import Flight
from gateway.telemetry import Watching


class Unwatched(Watching):
    def __init__(self, config: Any, conductor: Any, *args: Any) -> None:
        super().__init__(config, conductor, *args)
        self.observers.clear()
        conductor.flown.watchers.clear()


def forget(_flight: Flight, _end: Given | str, _now: float) -> str:
    return ""


def note_nothing(_flight: Flight, *_note: Any) -> None:
    pass


def main() -> None:
    gateway.app.Watching = Unwatched  # type: ignore[misc]
    Flight._remember = forget  # type: ignore[method-assign]
    Flight._note = note_nothing  # type: ignore[method-assign]
    cli.gateway()


if __name__ == "__main__":
    main()
