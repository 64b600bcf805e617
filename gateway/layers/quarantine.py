"""Refuse calls of tenants that lately brought engines down: the enforcement of `core/admission/quarantine.py`.

The layer refuses calls as they come; `QuarantineListener` observes the end of every attempt, and logs once whenever the
quarantine of a tenant begins.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import ceil

import structlog

from gateway.core.admission.quarantine import FOR_S, Quarantine, Suspect
from gateway.layers.admit import fingerprint
from gateway.layers.stack import Layer, Service
from tidegate.outcome import Overloaded, Poisonous, ServeError
from tidegate.types import Call, Reply

log = structlog.get_logger(__name__)


def quarantine(held: Quarantine, now: Callable[[], float]) -> Layer:
    def layer(inner: Service) -> Service:
        def service(call: Call) -> Awaitable[Reply]:
            if held:
                left_s = held.left_s(suspect_of(call), now())
                if left_s > 0.0:
                    held.refused += 1
                    raise _refusal(call, left_s)
            return inner(call)

        return service

    return layer


class QuarantineListener:
    """Reports the end of each attempt to the quarantine."""

    def __init__(self, held: Quarantine, now: Callable[[], float]) -> None:
        self._held = held
        self._now = now

    def answered(self, target: str) -> None:
        self._held.answered(target)

    def failed(self, call: Call, target: str, error: ServeError) -> None:
        if isinstance(error, Poisonous) and self._held.blamed(suspect_of(call), target, self._now()):
            who = call.tenant or "whoever asks the same (no tenant was named)"
            log.warning("quarantined", tenant=who, last_target=target, reason=error.message, for_s=FOR_S)

    def __repr__(self) -> str:
        return f"<QuarantineListener of {self._held!r}>"


def suspect_of(call: Call) -> Suspect:
    """The suspect of a call: its tenant; where it named none, the fingerprint of its request."""
    return call.tenant or fingerprint(call.request)


def _refusal(call: Call, left_s: float) -> Overloaded:
    who = f"requests of tenant {call.tenant!r}" if call.tenant else "requests like this one"
    why = f"{who} made the model fail on them alone, again and again; they are let in again in {ceil(left_s)} s"
    return Overloaded(f"quarantined: {why}", retry_after_s=left_s)
