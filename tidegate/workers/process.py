"""A worker process as its parent sees it: load engines, run them, and know at once when the worker is gone.

Engines live in a child because they block for long, because native code crashes, and because a runtime's memory is
only surely given back by ending its process. The child talks over a socket pair (`channel.py`). Large arrays go through
memory that both share (`shared_memory.py`): inputs are copied once, into it, and outputs are views of it, so keep them
no longer than they are needed, or copy them.

Invariants:
* Every call ends exactly once: with its answer, with the engine's error, with WorkerDied, or cancelled by its caller.
* At most PIPELINE calls are with the child, one computing and the others already in its memory; those after them wait
  here, in order, so that cancelling them costs nothing. A call cancelled after it was sent keeps its place until the
  child has answered for it, and that answer is dropped; the child skips it if it had not begun.
* When the child ends, however it ends, every pending call fails with WorkerDied, and so do later ones. A
  WorkerProcess does not restart itself: its owner enters a new one (`supervised.py`). Outputs that were handed out stay
  valid.

What it leaves to others: the order of calls (keep the queue yourself, and give it no more than may not be taken back),
restarting, batching.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import structlog
from numpy.typing import NDArray

from tidegate import clock
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import Generated
from tidegate.models.manifest import EngineName
from tidegate.models.packing import Packing
from tidegate.outcome import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutOfMemory,
    PeerError,
    ServeError,
    TooLarge,
)
from tidegate.pipeline.plan import StepPlan
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.spawned_process import SpawnedProcess, spawn
from tidegate.runtime.starvation import awake_s, starved_s
from tidegate.storage.scratch_folder import ScratchFolder
from tidegate.token_sink import TokenSink
from tidegate.types import Buffer
from tidegate.workers import channel
from tidegate.workers.array_transport import SHARE_FROM_BYTES, Handover
from tidegate.workers.channel import Arrays, FrameError
from tidegate.workers.exit_status import describe_exit
from tidegate.workers.generation.active_sequences import ActiveSequences
from tidegate.workers.generation.messages import SequenceToChild, StepTaken, UnexpectedMessage
from tidegate.workers.sandbox import SandboxMode

log = structlog.get_logger(__name__)

PIPELINE = 16
_HELLO = 0  # the id under which the child's first message is awaited; calls count from 1
_STOP_GRACE_S = 1.0  # from closing the socket to SIGKILL; the child leaves within milliseconds of the socket's end
_LAST_ANSWERS_S = 0.2  # from the end of the child until what it has written is read
_KILLED_WITHIN_S = 5.0  # from SIGKILL to the end of a child that the kernel does not hold


class WorkerDied(PeerError):
    """The worker process is gone, or never came up. Another target, or the next worker, may answer."""

    code = "unreachable"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to load: `key` names it in its worker; `outputs` are the manifest's output names in graph order.

    `threads` are those of one computation, 0 for all cores. `paced_slow` is for paced engines only, `packing` and
    `compile` are the variant's (`load_engine`). With `generation` the engine is one that generates. `steps` are run
    around the engine; where that is None, they are all there is. `sha256` is the artefact's, which is held against the
    file at each load, since a worker may be started again long after its parent looked; "": any.
    """

    key: str
    engine: EngineName | None
    artefact: Path
    outputs: tuple[str, ...]
    threads: int = 1
    device: str = "cpu"
    paced_slow: float = 1.0
    packing: Packing | None = None
    compile: bool = False
    generation: GenerationLimits | None = None
    steps: StepPlan | None = None
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How long loading took, and what the worker holds on its device since, all engines together.

    `device_bytes` is how much the device has where that is not the machine's memory. None: nobody knows. `slots` is
    how many sequences a generating engine takes at a time, 0 of any other.
    """

    load_s: float
    held_bytes: int | None = None
    device_bytes: int | None = None
    slots: int = 0


@dataclass(frozen=True, slots=True)
class ComputeResult:
    """What the engine gave, and the seconds it took in the worker, without the way there and back.

    `peak_bytes` is what it took beyond what the worker held before, where that was measured.
    """

    outputs: dict[str, NDArray[Any]]
    compute_s: float
    peak_bytes: int | None = None


_Answer = tuple[channel.Answer, Buffer]


class ChildFrames(asyncio.Protocol):
    """Cuts what comes from a child into frames, and hands each on in the turn of the loop in which it is complete.

    A stream reader would wake a task for it, which would wake the caller's: one more turn of the loop for each call.

    Args:
        take: called with each message and what followed it; may raise FrameError, which ends the connection.
    """

    def __init__(self, take: Callable[[channel.FromChild, Buffer], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # at the socket's end, or failed
        self._take = take
        self._parts: list[bytes] = []  # of a frame that is not complete
        self._there = 0  # bytes in them
        self._needed = channel.PREFIX_BYTES  # until then nothing can be done

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._there += len(data)
        if self._there < self._needed or self.ended.done():
            return
        whole = data if len(self._parts) == 1 else b"".join(self._parts)
        try:
            left = whole[self._cut(whole) :]
        except FrameError as error:
            self._parts.clear()
            self.ended.set_exception(error)
            return
        self._parts, self._there = [left] if left else [], len(left)

    def connection_lost(self, exc: Exception | None) -> None:
        """However the connection ended, the exit status says the rest."""
        if not self.ended.done():
            self.ended.set_result(None)

    def _cut(self, whole: bytes) -> int:
        """Hand on the frames that are complete; returns where the first one that is not begins."""
        at = 0
        while True:
            begins = at + channel.PREFIX_BYTES
            self._needed = channel.PREFIX_BYTES
            if len(whole) < begins:
                return at
            header_bytes, payload_bytes = channel.parse_prefix(whole[at:begins])
            follows = begins + header_bytes
            ends = follows + payload_bytes
            if len(whole) < ends:
                self._needed = ends - at
                return at
            # The payload as bytes of its own: aligned, and what arrays keep alive when they are kept is no more.
            self._take(channel.parse_from_child(whole[begins:follows]), whole[follows:ends])
            at = ends

    def __repr__(self) -> str:
        return f"<ChildFrames {self._there} of {self._needed} bytes there>"


class WorkerProcess:
    """One child process, alive inside `async with`.

    Args:
        name: for logs and errors.
        start_timeout_s: how long the child may take to come up, and how long one engine may take to load.
        cores: that it may run on; empty: all that this process may.
        share_from_bytes: payloads from this size on lie in shared memory.
        sandbox: whether the child gives up network and disk (`sandbox.py`).
        on_spawn: called with its pid when the process is there, before it has imported anything.
    """

    def __init__(
        self,
        name: str,
        *,
        start_timeout_s: float = 60.0,
        cores: frozenset[int] = frozenset(),
        share_from_bytes: int = SHARE_FROM_BYTES,
        sandbox: SandboxMode = "auto",
        on_spawn: Callable[[int], None] = lambda _pid: None,
    ) -> None:
        self._on_spawn = on_spawn
        self.name = name
        self.collected_s = 0.0  # by the child's garbage collections, as far as its answers told
        self._sandbox = sandbox
        self._scratch: ScratchFolder | None = None
        self._share_from_bytes = share_from_bytes
        self._handover = Handover.nothing()
        self._cores = cores
        self._start_timeout_s = start_timeout_s
        self._process: SpawnedProcess | None = None
        self._socket: asyncio.Transport | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(PIPELINE)
        self._pending: dict[int, asyncio.Future[_Answer]] = {}
        self._ids = itertools.count(1)
        self._sequences = ActiveSequences(self._send_sequence)
        self._reason: asyncio.Future[str] | None = None

    async def __aenter__(self) -> Self:
        self._reason = asyncio.get_running_loop().create_future()
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def starved_s(self) -> float:
        """Seconds in which the child was ready to run and got no core."""
        return starved_s(self.pid)

    @property
    def awake_s(self) -> float:
        """Seconds in which the child computed, or was ready to and got no core."""
        return awake_s(self.pid)

    @property
    def silent_s(self) -> float:
        """For how long the child owes a sign of its sequences and gave none; 0 where it owes none.

        While it has a plain call as well, it may be at work on that, which is watched by itself.
        """
        return 0.0 if self._pending else self._sequences.silent_s(clock.now())

    @property
    def sequence_patience_s(self) -> float:
        """How long it may be silent, by what its own steps and prompts took; inf while too little is known."""
        return self._sequences.patience_s()

    @property
    def alive(self) -> bool:
        return self._reason is not None and not self._reason.done()

    async def died(self) -> str:
        """Wait for the child's end and say how it came, for example "was killed by SIGKILL"."""
        if self._reason is None:
            raise RuntimeError(f"worker {self.name} was not started")
        return await asyncio.shield(self._reason)

    async def load(self, spec: EngineSpec) -> LoadResult:
        """Load an engine under `spec.key`, replacing one of that name.

        Raises:
            OutOfMemory: its device has too little memory for it.
            InternalError: the engine could not be loaded, with its own message.
            WorkerDied: the child ended, or did not answer within `start_timeout_s` (then it is ended).
        """
        message = channel.LoadEngine(
            id=next(self._ids),
            key=spec.key,
            engine=spec.engine or "",
            artefact=str(spec.artefact),
            outputs=spec.outputs,
            threads=spec.threads,
            device=spec.device,
            paced_slow=spec.paced_slow,
            packing=spec.packing,
            compile=spec.compile,
            generation=spec.generation,
            steps=spec.steps,
            sha256=spec.sha256,
        )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                answer, _ = await self._call(message.id, lambda: [channel.pack(message)])
        except TimeoutError as error:
            self._kill()
            raise WorkerDied(
                f"worker {self.name} did not load {spec.key!r} within {self._start_timeout_s:g} s"
            ) from error
        if not isinstance(answer, channel.EngineLoaded):
            raise self._failure(answer)
        self._sequences.engine_loaded(spec.key, answer.slots)
        return LoadResult(answer.load_s, answer.held_bytes, answer.device_bytes, answer.slots)

    async def infer(self, key: str, inputs: Arrays, *, budget_s: float | None = None) -> ComputeResult:
        """Run the engine under `key`. The arrays are not copied before they are written: leave them alone until then.

        Args:
            budget_s: what is left of the request's budget, for the steps of a pipeline; None: nobody said.

        Raises:
            InvalidRequest: a step of the pipeline cannot do this request; the worker is whole.
            DeadlineExceeded: a step cannot do it in the budget that is left.
            InternalError: the engine raised, or there is none under `key`; the worker lives on.
            OutOfMemory: the engine had too little memory for it; the worker lives on.
            TooLarge: the arrays are over `channel.MAX_PAYLOAD_BYTES` or of a type that does not travel.
            WorkerDied: the child is gone.
        """
        message = channel.RunEngine(next(self._ids), key, budget_s=budget_s)
        try:
            laid = channel.lay_out(inputs)
            answer, payload = await self._call(message.id, lambda: self._handover.frame(message, laid))
        except FrameError as error:
            raise TooLarge(str(error)) from error
        if not isinstance(answer, channel.RunCompleted):
            raise self._failure(answer)
        self.collected_s += answer.gc_s
        try:
            return ComputeResult(channel.unpack(answer.arrays, payload), answer.compute_s, answer.peak_bytes)
        except FrameError as error:
            raise InternalError(f"worker {self.name}: {error}") from error

    async def generate(
        self,
        key: str,
        request: GenerateRequest,
        sink: TokenSink | None,
        *,
        token_interval_s: float,
        first_token_s: float | None = None,
    ) -> Generated:
        """Run a generation on the engine under `key`: its tokens go into `sink` meanwhile, and all are returned.

        As many run at a time as the engine has slots; the others wait here, in order. The `sink` gets tokens for as
        long as its reader gives credit; one that raises ends its generation with what it raised.

        Args:
            sink: None: nobody reads before the end, and nothing is paused.
            token_interval_s: the time between two tokens that the caller wants kept; it orders who is stepped first.
            first_token_s: the same for the first token; None: as between two.

        Raises:
            InvalidRequest: the engine refused it, since it asks for what the engine cannot do.
            InternalError: the engine failed, or there is none under `key`; the worker lives on.
            OutOfMemory: the engine had too little memory for it; the worker lives on.
            TooLarge: the prompt or the schema is too large to travel.
            WorkerDied: the child is gone.
        """
        first_s = token_interval_s if first_token_s is None else first_token_s
        if not (token_interval_s > 0.0 and first_s > 0.0):
            raise ValueError(f"token_interval_s {token_interval_s} and first_token_s {first_s} must be over 0")
        if not self.alive:
            raise WorkerDied(self._obituary())
        try:
            return await self._sequences.generate(
                key, request, sink, token_interval_s=token_interval_s, first_token_s=first_s
            )
        except FrameError as error:
            raise TooLarge(str(error)) from error

    async def _start(self) -> None:
        if self._sandbox != "off":
            self._scratch = ScratchFolder.make("tidegate-worker-")
        self._handover = Handover.to_child(self._share_from_bytes)
        ours, theirs = socket.socketpair()
        hello = self._expect(_HELLO)
        with theirs:
            try:
                self._process = self._spawn(theirs)
                self._on_spawn(self._process.pid)
                loop = asyncio.get_running_loop()
                self._socket, frames = await loop.create_connection(lambda: ChildFrames(self._take), sock=ours)
            except BaseException:
                ours.close()
                raise
        self._watcher = asyncio.create_task(self._watch(frames), name=f"worker {self.name}")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await hello
        except TimeoutError as error:
            raise WorkerDied(f"worker {self.name} did not start within {self._start_timeout_s:g} s") from error

    def _spawn(self, theirs: socket.socket) -> SpawnedProcess:
        inputs, outputs = self._handover.files
        return spawn(
            [
                sys.executable,
                "-P",  # a folder in which we were started may have packages of our names
                "-m",
                "tidegate.workers.child",
                str(theirs.fileno()),
                str(os.getpid()),
                ",".join(map(str, sorted(self._cores))),
                ",".join(map(str, inputs)),
                ",".join(map(str, outputs)),
                str(self._share_from_bytes),
                str(self._scratch.files) if self._scratch else "",
            ],
            pass_fds=(theirs.fileno(), *inputs, *outputs),
            # numpy's own BLAS pool is never used in a worker; the runtimes' pools are bounded when an engine is
            # loaded.
            # Threads that wait must sleep: OpenMP's spin takes the core from the very process that would feed them (a
            # training beside busy neighbours took 6 s instead of 42 s). Whoever owns the machine alone may set ACTIVE.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )

    async def _call(self, call_id: int, frame: Callable[[], Sequence[Buffer]]) -> _Answer:
        """Send one frame, made when there is a place for it, and wait for the answer of the same id."""
        await self._places.acquire()
        try:
            if not self.alive or self._socket is None:
                raise WorkerDied(self._obituary())
            parts = frame()
            answer = self._expect(call_id)
            if not self._socket.is_closing():  # else it has died, and all of its calls fail once it is reaped
                self._socket.writelines(parts)
        except BaseException:
            if self._pending.pop(call_id, None) is not None:  # nobody would hear that its worker has died
                self._handover.answered(call_id)
            self._places.release()
            raise
        # From here on the place belongs to the answer and not to the caller, who may leave: whoever takes the call out
        # of `_pending` gives it back. A shield would say the same, for one more turn of the loop in every call.
        try:
            return await answer
        except (asyncio.CancelledError, GeneratorExit):
            self._abandon(call_id, answer)
            raise

    def _expect(self, call_id: int) -> asyncio.Future[_Answer]:
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = answer
        return answer

    def _abandon(self, call_id: int, answer: asyncio.Future[_Answer]) -> None:
        if answer.done() and not answer.cancelled():
            answer.exception()  # seen, though its caller was cancelled in the moment in which it was set
        elif call_id in self._pending and self.alive and self._socket is not None:
            answer.cancel()  # where the caller was dropped without a cancellation, say at the end of its loop
            if not self._socket.is_closing():
                self._socket.write(channel.pack(channel.CancelRun(call_id)))

    async def _watch(self, frames: ChildFrames) -> None:
        """Wait until the child ends, while `frames` hands answers to their callers; then tell everyone."""
        because = ""
        try:
            await self._over(frames)
        except FrameError as error:
            because = f" after {error}"
            self._kill()
        finally:
            self._bury(await self._reap() + because)

    async def _over(self, frames: ChildFrames) -> None:
        """Wait for the end of the child's socket, or of the child itself where a fork of it keeps the socket open.

        Raises FrameError.
        """
        assert self._process is not None and self._socket is not None
        exited = asyncio.create_task(self._process.wait(), name=f"worker {self.name} exits")
        try:
            await asyncio.wait((frames.ended, exited), return_when=asyncio.FIRST_COMPLETED)
            if not frames.ended.done():
                await asyncio.wait((frames.ended,), timeout=_LAST_ANSWERS_S)
        finally:
            await cancel_and_wait(exited)
        if frames.ended.done():
            frames.ended.result()
        else:
            self._socket.abort()

    def _send_sequence(self, message: SequenceToChild, prompt: bytes) -> None:
        """Raises FrameError, or WorkerDied."""
        if not self.alive or self._socket is None:
            raise WorkerDied(self._obituary())
        if not self._socket.is_closing():  # else it has died, and all of its sequences fail once it is reaped
            self._socket.write(channel.pack_sequence(message, prompt))

    def _deliver(self, message: channel.Answer, payload: Buffer) -> None:
        call_id = _HELLO if isinstance(message, channel.WorkerHello) else message.id
        answer = self._pending.pop(call_id, None)
        if answer is None:
            raise FrameError(f"an answer to {call_id}, which nobody asked")
        if call_id != _HELLO:
            self._places.release()
            self._sequences.silence.begin(clock.now())
        self._handover.answered(call_id)
        if not answer.done():
            answer.set_result((message, payload))

    def _take(self, message: channel.FromChild, followed: Buffer) -> None:
        """Take a frame in. Raises FrameError."""
        if isinstance(message, StepTaken):
            try:
                self._sequences.take(message)
            except UnexpectedMessage as error:
                raise FrameError(f"the worker told {error}") from error
            return
        if isinstance(message, channel.RunCompleted):
            followed = self._handover.payload(message, followed)
        self._deliver(message, followed)

    async def _reap(self) -> str:
        """Wait for the exit status; a child that closed its socket but stays is ended."""
        assert self._process is not None
        try:
            async with asyncio.timeout(_STOP_GRACE_S):
                return describe_exit(await self._process.wait())
        except TimeoutError:
            self._kill()
            return await self._killed()

    async def _killed(self) -> str:
        """Wait for the end of a child that got SIGKILL; one that stands in the kernel, say in a driver, is left there.

        It ends when the kernel lets it, and is reaped then. Until that it may hold memory of its device.
        """
        assert self._process is not None
        try:
            async with asyncio.timeout(_KILLED_WITHIN_S):
                return describe_exit(await self._process.wait())
        except TimeoutError:
            log.error("a worker was killed and does not end: the kernel holds it", worker=self.name, pid=self.pid)
            return f"was killed and does not end: the kernel holds process {self.pid}"

    def _bury(self, reason: str) -> None:
        assert self._reason is not None
        if not self._reason.done():
            self._reason.set_result(reason)
        self._handover.close()
        pending, self._pending = self._pending, {}
        for call_id, answer in pending.items():
            if call_id != _HELLO:
                self._places.release()
            if not answer.done():
                answer.set_exception(WorkerDied(self._obituary()))
        self._sequences.fail_all(lambda: WorkerDied(self._obituary()))

    def _obituary(self) -> str:
        if self._reason is None:
            return f"worker {self.name} was not started"
        return f"worker {self.name} {self._reason.result()}"

    def _failure(self, answer: channel.Answer) -> ServeError:
        if isinstance(answer, channel.RunFailed) and answer.refused:
            return (DeadlineExceeded if answer.late else InvalidRequest)(answer.message)
        if isinstance(answer, channel.RunFailed):
            return (OutOfMemory if answer.out_of_memory else InternalError)(answer.message)
        return InternalError(f"worker {self.name} answered with {type(answer).__name__}")

    async def _stop(self) -> None:
        try:
            await self._end()
        finally:
            scratch, self._scratch = self._scratch, None
            if scratch is not None:  # a program may have filled it
                await asyncio.to_thread(scratch.remove)

    async def _end(self) -> None:
        """End the child: by the end of its socket, which it obeys in the midst of anything, else by SIGKILL."""
        if self._watcher is None:  # it never came to talk
            self._handover.close()
            self._kill()
            if self._process is not None:
                await self._killed()
            return
        if self._socket is not None:
            self._socket.abort()
        try:
            await asyncio.shield(self._watcher)
        except asyncio.CancelledError:
            self._kill()
            await self._watcher
            raise

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            if self._process is not None:
                self._process.kill()

    def __repr__(self) -> str:
        if self._reason is None:
            return f"<WorkerProcess {self.name} not started>"
        if self._reason.done():
            return f"<WorkerProcess {self.name} {self._reason.result()}>"
        return f"<WorkerProcess {self.name} pid {self.pid} {self._under_way()} {self._handover!r}>"

    def _under_way(self) -> str:
        sequences = f", {len(self._sequences)} sequences" if len(self._sequences) else ""
        return f"{len(self._pending)} pending{sequences}"
