"""One target as the dispatcher sees it: it answers a request within a budget, or fails with the reason.

Three kinds stand behind it: `link` speaks the link stream to targets of our own, `unary` plain OIP to foreign servers,
`openai` the interface of OpenAI to another maker's. All translate every failure of their transport into a ServeError,
once, with the original as its cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tidegate.token_sink import TokenObjectives, TokenSink
from tidegate.types import Accepted, InferRequest, Reply


class Target(Protocol):
    """Cancelling `infer` cancels the attempt on the wire and in the queue that it waits in, without waiting for either.

    It may be awaited in the caller's own task: whatever it still awaits after a cancellation keeps the caller waiting.
    """

    @property
    def id(self) -> str:
        """ "edge/NAME", "pool/NAME" or "site/NAME"."""
        ...

    async def infer(
        self,
        request: InferRequest,
        *,
        variant: str,
        budget_s: float,
        priority: int,
        traceparent: str,
        on_accepted: Callable[[Accepted], None],
        tracestate: str = "",
        tokens: TokenSink | None = None,
        objectives: TokenObjectives | None = None,
    ) -> Reply:
        """The answer with its stage times (`queue`, `compute`, seconds) and the target's load where it reports one.

        Args:
            tokens: where a generation's tokens go as they come; a transport without streams gives them with the answer.
            objectives: by when they should come; None: it does not matter, or the transport has no word for it.

        Raises:
            ServeError: any refusal of the target under its own class; Unreachable when the link or the process is gone;
                DeadlineExceeded when `budget_s` ran out; BadAnswer when what came back is no answer to this request.
        """
        ...
