"""The ingest service puts together the receiver of stored items and the worker that computes deferred requests.

It is separate from `gateway/app.py` because a gateway without the section `ingest` has none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self

from aiohttp import web

from gateway.config.ingest import IngestConfig
from gateway.ingest.deferred import DeferredWorker, Service
from gateway.ingest.receiver import Ingest
from gateway.ingest.routes import ingest_routes
from gateway.ingest.shared_items import SharedItems
from gateway.store.shared_store import SharedStore
from tidegate.models.manifest import Manifest


class IngestService:
    """Takes stored items and computes deferred requests inside `async with`.

    Args:
        gateway: this gateway's name.
        infer: answers deferred requests: placement behind admission, without the observers of live traffic.
        store: where gateways keep items for each other; None: each keeps its own.
    """

    def __init__(
        self,
        section: IngestConfig,
        gateway: str,
        infer: Service,
        manifest_of: Callable[[str, str], Manifest],
        store: SharedStore | None = None,
    ) -> None:
        self.ingest = Ingest(
            section.path,
            gateway,
            max_bytes=section.max_bytes,
            max_seen=section.max_remembered,
            right_of=section.right_of,
            shared=SharedItems(store, gateway) if store is not None else None,
        )
        self._deferred = DeferredWorker(self.ingest, infer, manifest_of, section.may_ask)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with self._stack:
            await self._stack.enter_async_context(self.ingest)
            await self._stack.enter_async_context(self._deferred)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def routes(self) -> list[web.RouteDef]:
        return ingest_routes(self.ingest)

    def __repr__(self) -> str:
        return f"<IngestService {self.ingest!r} {self._deferred!r}>"
