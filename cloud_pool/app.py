"""The pool put together: what is started in which order, and how it ends.

    repository → port taken → worker loads and warms → server starts → ready

The port is taken first, so that a taken one is known before minutes of warm-up; connections wait in its backlog until
the server starts, when everything is warm.

The end runs backwards and within `drain_s` plus a moment: new requests are refused, each link stream hears a goodbye,
what is under way is answered; then server, worker and futures end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import grpc
import structlog

from cloud_pool.catalogue import read_catalogue
from cloud_pool.config import PoolConfig
from cloud_pool.host import PoolHost
from cloud_pool.scheduler import Scheduler
from cloud_pool.supervisor import Supervisor
from cloud_pool.worker import Loadable
from tidegate import clock
from tidegate.backoff import Backoff
from tidegate.doors.grpc_door import grpc_door
from tidegate.link.answerer import LinkService, add_link_service
from tidegate.models.repository import Repository
from tidegate.oip.grpc_server import add_oip_service
from tidegate.workers.process import WorkerProcess

DOOR_GRACE_S = 0.1  # what calls that are left get when the door closes, after the drain
log = structlog.get_logger(__name__)


class PoolApp:
    """A whole pool, serving inside `async with`.

    Args:
        draw: chance, uniform in [0, 1).
        on_progress: told in words what a long start is at.
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        draw: Callable[[], float] = random.random,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.address = ""
        self._draw = draw
        self._on_progress = on_progress
        self._stack = AsyncExitStack()
        self._host: PoolHost | None = None
        self._scheduler: Scheduler | None = None
        self._supervisor: Supervisor | None = None
        self._link: LinkService | None = None
        self._announcements: set[asyncio.Task[None]] = set()

    @property
    def host(self) -> PoolHost:
        assert self._host is not None, "enter the app first"
        return self._host

    async def __aenter__(self) -> Self:
        async with self._stack:
            await self._start()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def failed(self) -> None:
        """Wait for a defect that ends the supervision of the worker: raises it."""
        assert self._supervisor is not None, "enter the app first"
        await self._supervisor.failed()

    def ready_event(self) -> dict[str, Any]:
        """The fields of the `ready` event."""
        models = [
            {"name": offer.name, "version": offer.version, "variants": [variant.name for variant in offer.variants]}
            for offer in self.host.offers()
        ]
        return {"role": "pool", "name": self.config.name, "addresses": {"grpc": self.address}, "models": models}

    async def _start(self) -> None:
        config = self.config
        repository = Repository(config.model_repository)
        loadables = await asyncio.to_thread(read_catalogue, repository, config.models, config.precision)
        self._scheduler = await self._stack.enter_async_context(Scheduler())
        self._supervisor = self._new_supervisor(loadables, self._scheduler)
        epoch = int(clock.utc_s() * 1e6)
        self._host = PoolHost(config.name, loadables, self._scheduler, self._supervisor, epoch=epoch)
        door = await self._stack.enter_async_context(
            grpc_door(
                self._add_services,
                config.host,
                config.grpc_port,
                max_message_bytes=config.max_message_bytes,
                grace_s=DOOR_GRACE_S,
            )
        )
        self.address = door.address
        await self._stack.enter_async_context(self._supervisor)
        await door.server.start()
        self._stack.push_async_callback(self._drain, door.server)

    def _new_supervisor(self, loadables: list[Loadable], scheduler: Scheduler) -> Supervisor:
        config = self.config
        return Supervisor(
            loadables,
            scheduler,
            start_process=lambda life: WorkerProcess(f"{config.name}/{life}"),
            backoff=Backoff(self._draw, base_s=0.5, cap_s=30.0),
            device=config.device,
            threads=config.threads,
            hang_timeout_s=config.hang_timeout_s,
            warmup_budget_s=config.warmup_budget_s,
            on_change=self._announce,
            on_progress=self._on_progress,
        )

    def _add_services(self, server: grpc.aio.Server) -> None:
        host, limit = self.host, self.config.max_message_bytes
        add_oip_service(server, host, max_message_bytes=limit)
        self._link = add_link_service(
            server,
            host,
            name=host.server_name,
            epoch=lambda: host.epoch,
            offers=host.offers,
            load=host.load_report,
            max_message_bytes=limit,
        )

    def _announce(self) -> None:
        """The models came or went: gateways on a link stream hear it now."""
        if self._link is not None:
            task = asyncio.create_task(self._link.announce(), name="announce")
            self._announcements.add(task)
            task.add_done_callback(self._announcements.discard)

    async def _drain(self, server: grpc.aio.Server) -> None:
        assert self._scheduler is not None and self._link is not None
        self.host.drain()
        try:
            async with asyncio.timeout(self.config.drain_s):
                await asyncio.gather(self._link.drain("shutdown"), self._scheduler.drained())
        except TimeoutError:
            log.warning("requests were still under way at shutdown", queued=self._scheduler.queued)
        self._scheduler.close()
        await server.stop(DOOR_GRACE_S)

    def __repr__(self) -> str:
        return f"<PoolApp {self.config.name} {self.address} {self._host!r}>"
