"""Compute a call in halves where its model may be cut between layers and that is better now.

The enforcement of `gateway/serving/layer_splitting.py`. Innermost: what a cut is weighed against is the placement of
one version, and each half goes on to the dispatcher as a request of its own; layers further out see one request and one
answer. So a limit, a quota and a cache count the whole, and what is compared by shadowing is the answer of the whole.

The layer is left out where no manifest has a section `split`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from gateway.layers.stack import Layer, Service
from tidegate.types import Call, Reply


class LayerSplitter(Protocol):
    """Answers a call by a service: once, or in halves."""

    def served(self, call: Call, infer: Service) -> Awaitable[Reply]: ...


def split(splitter: LayerSplitter) -> Layer:
    def layer(inner: Service) -> Service:
        def service(call: Call) -> Awaitable[Reply]:
            return splitter.served(call, inner)

        return service

    return layer
