"""The headers of a served gRPC stream, sent before any of its messages.

gRPC sends them with the first message otherwise. Where that write is cancelled on its way, because the stream ends in
that moment, gRPC sends them once more with the status, fails with TOO_MANY_OPERATIONS, and the caller never learns
that its stream is over: it waits for its own deadline, or for ever.
"""

from __future__ import annotations

import contextlib
from typing import Any

import grpc


async def send_headers(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Call it first in a handler that writes from tasks which may be cancelled. To a caller that has left it does
    nothing, which the first read or write will tell."""
    with contextlib.suppress(grpc.aio.UsageError, grpc.aio.InternalError):
        await context.send_initial_metadata(())
