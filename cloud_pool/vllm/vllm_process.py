"""vLLM's server where a pool has a worker process: it loads one generating model and streams its answers.

    entered → `load`: the server starts, is polled until it is well, and is asked for a token → `generate` … → left

What a caller sees of it is that of a `WorkerProcess` (`tidegate/workers/process.py`), and so are its ends: every
generation that it had fails with WorkerDied, and its owner starts another. A server that closes a connection, or says
that it is not well, gets a second to end by itself.

While it loads, which takes minutes, nothing is owed, so no watchdog looks; its own output is told (`readiness.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

import structlog

from cloud_pool.vllm.command_line import serve_command, serve_environment
from cloud_pool.vllm.executable import find_vllm
from cloud_pool.vllm.gpu_memory import gpu_memory_bytes
from cloud_pool.vllm.http_client import VllmClient
from cloud_pool.vllm.readiness import until_ready
from cloud_pool.vllm.served_model import plan_server
from cloud_pool.vllm.server_process import ServerProcess
from cloud_pool.vllm.server_sequences import ServerSequences
from cloud_pool.vllm.vllm_config import VllmConfig
from tidegate import clock
from tidegate.engines.protocol import Arrays
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import Generated
from tidegate.outcome import InternalError
from tidegate.runtime.owned_task import OwnedTask, cancel_and_wait
from tidegate.storage.scratch_folder import ScratchFolder
from tidegate.token_sink import TokenSink
from tidegate.workers.generation.active_sequences import ActiveSequences
from tidegate.workers.generation.messages import SequenceToChild, StepTaken, UnexpectedMessage
from tidegate.workers.process import ComputeResult, EngineSpec, LoadResult, WorkerDied

_HEALTH_S: Final = 1.0  # in which one that is well says so
_END_GRACE_S: Final = 0.2  # of a server that is not well: one that is at its end has gone by then

log = structlog.get_logger("vllm")


class VllmProcess:
    """One server, alive inside `async with`.

    Args:
        name: for logs and errors.
        cache_bytes: of all attention caches; infinite: as vLLM likes.
        token_bytes: that one token's cache takes; 0: not known.
        on_cpu: whether it computes on the processor, for sure.
        cores: that it may run on; empty: all that this process may.
    """

    def __init__(
        self,
        name: str,
        config: VllmConfig,
        *,
        cache_bytes: float,
        token_bytes: int,
        on_cpu: bool,
        cores: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.collected_s = 0.0  # by garbage collections, which vLLM does not tell
        self._config = config
        self._cache_bytes = cache_bytes
        self._token_bytes = token_bytes
        self._on_cpu = on_cpu
        self._server = ServerProcess(name, cores=cores)
        self._active = ActiveSequences(self._send)
        self._sequences: ServerSequences | None = None
        self._folder = Path()
        self._stack = AsyncExitStack()
        self._reason: asyncio.Future[str] | None = None
        self._broken = ""  # why the server is given up
        self._watching = OwnedTask(self._watch, name=f"vLLM {name}")
        self._giving_up = OwnedTask(self._give_up, name=f"the end of vLLM {name}")

    async def __aenter__(self) -> Self:
        self._reason = asyncio.get_running_loop().create_future()
        async with self._stack:
            scratch = ScratchFolder.make("tidegate-vllm-")
            self._stack.push_async_callback(asyncio.to_thread, scratch.remove)
            self._folder = scratch.files
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._bury("is stopped")

    @property
    def pid(self) -> int | None:
        return self._server.pid

    @property
    def alive(self) -> bool:
        return self._reason is not None and not self._reason.done() and not self._broken

    @property
    def starved_s(self) -> float:
        return self._server.starved_s

    @property
    def silent_s(self) -> float:
        """For how long the server owes tokens and gave no sign; 0 where it owes none."""
        return self._active.silent_s(clock.now())

    @property
    def sequence_patience_s(self) -> float:
        """How long it may be silent, by what its own steps and prompts took; inf while too little is known."""
        return self._active.patience_s()

    async def died(self) -> str:
        """Wait for its end, and say how it came."""
        assert self._reason is not None, "enter it first"
        return await asyncio.shield(self._reason)

    async def load(self, spec: EngineSpec) -> LoadResult:
        """Start the server for a model, and wait until it has given a token.

        Raises:
            InternalError: the server speaks otherwise, or the model's folder is not what it should be.
            WorkerDied: it could not be started, ended, or was not ready within `start_timeout_s`.
        """
        assert self._sequences is None, "a server has one model"
        began_at = clock.now()
        plan, limits = await asyncio.to_thread(
            plan_server,
            replace(spec, device="cpu") if self._on_cpu else spec,
            self._config,
            self._folder,
            cache_bytes=self._cache_bytes,
            token_bytes=self._token_bytes,
        )
        command = serve_command(find_vllm(self._config.executable) or self._config.executable, plan)
        environment = serve_environment(os.environ, plan)
        client = await self._stack.enter_async_context(VllmClient(plan.socket))
        self._stack.push_async_callback(self._stop, client)  # also where the start is cancelled in the midst
        await self._server.start(command, environment, self._folder)
        self._watching.start()
        self._stack.push_async_callback(self._watching.aclose)
        self._stack.push_async_callback(self._giving_up.aclose)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                version = await self._unless_it_ends(until_ready(self.name, client, self._server.log, limits))
        except TimeoutError as error:
            raise WorkerDied(
                f"vLLM was not ready within vllm.start_timeout_s, {self._config.start_timeout_s:g} s; it was at: "
                f"{self._server.log.last_line}"
            ) from error
        self._sequences = ServerSequences(spec.artefact.parent.name, client, limits, self._tell, self._on_broken)
        self._stack.push_async_callback(self._sequences.aclose)
        self._active.engine_loaded(spec.key, limits.slots)
        load_s = clock.now() - began_at
        log.info("vllm ready", worker=self.name, version=version, slots=limits.slots, load_s=round(load_s, 1))
        gpu = environment.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        device_bytes = None if self._on_cpu else await gpu_memory_bytes(gpu or "0")
        held_bytes = spec.artefact.stat().st_size if device_bytes is not None else None
        return LoadResult(load_s, held_bytes, device_bytes, limits.slots)

    async def infer(self, key: str, inputs: Arrays, *, budget_s: float | None = None) -> ComputeResult:
        """Raises InternalError: it has no single answers."""
        raise InternalError(f"{key} is served by vLLM, which has no single answers ({len(inputs)} inputs)")

    async def generate(
        self,
        key: str,
        request: GenerateRequest,
        sink: TokenSink | None,
        *,
        token_interval_s: float,
        first_token_s: float | None = None,
    ) -> Generated:
        """As `WorkerProcess.generate`; intervals order nothing here, since vLLM steps all of its sequences together."""
        if not self.alive:
            raise WorkerDied(self._obituary())
        first_s = token_interval_s if first_token_s is None else first_token_s
        return await self._active.generate(key, request, sink, token_interval_s=token_interval_s, first_token_s=first_s)

    async def _unless_it_ends(self, ready: Coroutine[Any, Any, str]) -> str:
        """What `ready` returns. Raises WorkerDied where the server ends before."""
        waiting = asyncio.create_task(ready, name=f"start of vLLM {self.name}")
        ending = asyncio.create_task(self.died(), name=f"early end of vLLM {self.name}")
        try:
            await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise WorkerDied(self._obituary())
            return waiting.result()
        finally:
            await cancel_and_wait(waiting, ending)

    async def _stop(self, client: VllmClient) -> None:
        """End it by itself where it is well; one that hangs, or is still loading, would take all of its grace."""
        if not await client.healthy(_HEALTH_S):
            await self._server.kill()
        await self._server.stop()

    async def _watch(self) -> None:
        self._bury(await self._server.ended())

    async def _give_up(self) -> None:
        """A server that is not well ends by itself, or is ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_GRACE_S):
                await self._server.ended()
        await self._server.kill()

    def _on_broken(self, why: str) -> None:
        if not self._broken and self.alive:
            self._broken = why
            self._giving_up.start()

    def _tell(self, step: StepTaken) -> None:
        try:
            self._active.take(step)
        except UnexpectedMessage as error:
            self._on_broken(f"told {error}")

    def _send(self, message: SequenceToChild, prompt: bytes) -> None:
        """Raises WorkerDied."""
        if not self.alive or self._sequences is None:
            raise WorkerDied(self._obituary())
        self._sequences.take(message, prompt)

    def _bury(self, reason: str) -> None:
        assert self._reason is not None
        if not self._reason.done():
            self._reason.set_result(f"{reason}, after it {self._broken}" if self._broken else reason)
        self._active.fail_all(lambda: WorkerDied(self._obituary()))

    def _obituary(self) -> str:
        if self._reason is None or not self._reason.done():
            return f"vLLM {self.name} {self._broken or 'is not started'}"
        return f"vLLM {self.name} {self._reason.result()}"

    def __repr__(self) -> str:
        if self._reason is None:
            return f"<VllmProcess {self.name} not started>"
        if self._reason.done():
            return f"<VllmProcess {self.name} {self._reason.result()[:80]}>"
        return f"<VllmProcess {self.name} {self._server!r} {len(self._active)} sequences>"
