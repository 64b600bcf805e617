"""One line per finished request, for people (`text`) or for `tidegate up` (`json`, an event on stdout).

An observer of the stack that is only there when it is wanted: without it a request costs nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.core.history.recorder import trace_id_of
from gateway.serving.work_estimate import WorkDescription
from tidegate.generate.budgets_kept import budgets_kept
from tidegate.generate.usage import usage_if_generated
from tidegate.oip.reply import resumed_text
from tidegate.outcome import Outcome, ServeError
from tidegate.types import Call, Reply

Write = Callable[..., None]  # an event's name and its fields


class AccessLog:
    """An `Observer`. `describe` prices the call, `write` takes the event `served` and its fields.

    Args:
        sample: share of the requests that went well which have a line; all others have theirs.
        draw: chance, uniform in [0, 1).
    """

    def __init__(
        self,
        describe: Callable[[Call], WorkDescription],
        write: Write,
        *,
        sample: float = 1.0,
        draw: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._describe = describe
        self._write = write
        self._sample = sample
        self._draw = draw

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        route = reply.route
        left_s = reply.budget_left_s
        late = left_s is not None and left_s < 0
        if not late and self._sample < 1.0 and not (call.trace and call.trace.kept) and self._draw() >= self._sample:
            return
        degraded = route is not None and route.degraded
        outcome = Outcome.LATE if late else Outcome.DEGRADED if degraded else Outcome.OK
        self._write(
            "served",
            **self._common(call, outcome, now),
            served_by=route.served_by if route else "",
            reason=route.reason if route else "",
            variant=reply.variant,
            attempts=route.attempts if route else 0,
            fallback=bool(route and route.fallback),
            provisional=bool(route and route.provisional),
            budget_left_ms=None if left_s is None else _ms(left_s),
            **({"resumed": ", ".join(map(resumed_text, route.resumed))} if route and route.resumed else {}),
            **_tokens(call, reply, now - call.arrived_at),
        )

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        outcome = Outcome.of(error)
        self._write(
            "served",
            **self._common(call, outcome, now),
            served_by="",
            reason=str(error) or outcome.value,
            variant="",
            attempts=0,
            fallback=False,
            provisional=False,
            budget_left_ms=None if call.deadline is None else _ms(call.deadline - now),
        )

    def _common(self, call: Call, outcome: Outcome, now: float) -> dict[str, Any]:
        return {
            "id": call.request.id,
            "model": call.request.model_name,
            "protocol": call.protocol,
            "outcome": outcome.value,
            **self._work(call),
            "latency_ms": _ms(now - call.arrived_at),
            **({"trace_id": trace_id} if (trace_id := trace_id_of(call)) else {}),
            **({"asked_by": call.asker} if call.path and call.asker else {}),
        }

    def _work(self, call: Call) -> dict[str, Any]:
        try:
            work = self._describe(call)
        except ServeError:  # its version was unloaded meanwhile
            return {}
        return {
            "feature": work.feature,
            "units": round(work.units, 1),
            "cost_class": work.cost_class,
            "budget_ms": _ms(work.budget_s),
        }


def _tokens(call: Call, reply: Reply, latency_s: float) -> dict[str, Any]:
    """What a generation took, where the answer is one; where it was streamed, how fast its tokens came too."""
    usage = usage_if_generated(reply.response)
    if usage is None:
        return {}
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "finish_reason": usage.finish_reason,
    }
    first_s = reply.first_token_s
    if first_s is not None:
        found["first_token_ms"] = _ms(first_s)
        if usage.completion_tokens > 1 and latency_s > first_s:
            found["tokens_per_s"] = round((usage.completion_tokens - 1) / (latency_s - first_s), 1)
    kept = budgets_kept(call, first_s, latency_s, usage.completion_tokens)
    for name, budget_s, is_kept in (("ttft", call.ttft_s, kept.first), ("tpot", call.tpot_s, kept.next)):
        if budget_s is not None and is_kept is not None:
            found |= {f"{name}_budget_ms": _ms(budget_s), f"{name}_kept": is_kept}
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
