"""The worker process: engines in, arrays out, one call after another. Started by `process.py`, never by hand.

Large arrays come and go in memory that is shared with the parent (`shared_memory.py`), small ones through the socket.

The main thread computes, because some runtimes bind their state to the thread that loaded them, and takes the calls
off the socket itself (`inbox.py`).

A worker ends with its parent, however the parent ends: the kernel sends SIGKILL (Linux), and a watch ends the process
at the end of the socket (everywhere), even in the middle of a long computation. Nothing here needs an orderly end.
SIGINT and SIGTERM are ignored: Ctrl-C and service managers send them to the whole group, and a parent that drains still
needs its worker; it closes the socket when it is done.

Engines that generate have sequences instead of calls (`generation/sequence_loop.py`): while any of them may go on, the
main thread steps them, and looks at its inbox between two steps.

An engine's exception is an answer (Failed), not an end. Whatever an engine prints goes to stderr: stdout belongs to
the parent's events.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, cast

from tidegate import clock
from tidegate.engines.engine import (
    Arrays,
    Engine,
    EngineError,
    import_runtime,
    load_engine,
    load_generative_engine,
)
from tidegate.engines.errors import InputRefused, is_out_of_memory
from tidegate.generate.engine import GenerativeEngine
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import EngineName
from tidegate.pipeline.pipeline_engine import PipelineEngine
from tidegate.pipeline.refusal import StepRefused, StepTooLate
from tidegate.runtime.lifeline import die_with_parent
from tidegate.runtime.settled_imports import settled_imports
from tidegate.types import Buffer
from tidegate.workers import channel, sandbox
from tidegate.workers.array_transport import Handover
from tidegate.workers.channel import (
    EngineLoaded,
    FrameError,
    LoadEngine,
    RunCompleted,
    RunEngine,
    RunFailed,
    RunSkipped,
    WorkerHello,
)
from tidegate.workers.collection_timer import CollectionTimer
from tidegate.workers.generation.messages import UnexpectedMessage
from tidegate.workers.generation.sequence_loop import SequenceLoop
from tidegate.workers.inbox import CallFrames, CallInbox, Work, end_process, end_with_parent
from tidegate.workers.memory_meter import Meter, device_meter_of
from tidegate.workers.shared_memory import Incoming, Outgoing

_PR_SET_NO_NEW_PRIVS = 38
_PARTS = 512  # in one call; the system takes 1024 at most


class ComputeServer:
    """The computing side: engines by key, and the socket and the segments that answers leave by."""

    def __init__(self, sock: socket.socket, handover: Handover, inbox: CallInbox) -> None:
        self._sock = sock
        self._handover = handover
        self._inbox = inbox
        self._engines: dict[str, Engine] = {}
        self._generative: dict[str, GenerativeEngine] = {}
        self._sequences = SequenceLoop(self._generative, sock.sendall, channel.pack)
        self._meter = Meter()
        self._collections = CollectionTimer()

    def prepare(self, message: LoadEngine | RunEngine, arrays: Arrays) -> Arrays:
        """What the engine can do for a call before its turn, in the reader's thread: send it to the device."""
        engine = self._engines.get(message.key) if isinstance(message, RunEngine) else None
        prepare: Callable[[Arrays], Arrays] | None = getattr(engine, "prepare", None)
        return arrays if prepare is None else prepare(arrays)

    def serve(self) -> NoReturn:
        self._collections.start()
        self._sock.sendall(channel.pack(WorkerHello(os.getpid())))
        while True:
            entry = self._inbox.take_if_any() if self._sequences.due else self._inbox.take()
            if entry is None:
                self._sequences.step()
            elif not isinstance(entry, tuple):
                self._sequences.take(entry)
            else:
                self._call(*entry)
                if self._sequences.due:  # calls that follow one another leave every other turn to the sequences
                    self._sequences.step()

    def _call(self, work: Work, cancelled: bool) -> None:
        message, arrays = work
        if cancelled:
            self._sock.sendall(channel.pack(RunSkipped(message.id)))
        else:
            send(self._sock, self._answer(message, arrays))

    def _answer(self, message: LoadEngine | RunEngine, arrays: Arrays) -> list[Buffer]:
        try:
            return self._load(message) if isinstance(message, LoadEngine) else self._infer(message, arrays)
        except (StepRefused, InputRefused) as error:
            words, late = channel.shorten(str(error)), isinstance(error, StepTooLate)
            return [channel.pack(RunFailed(message.id, words, refused=True, late=late))]
        except (EngineError, FrameError) as error:
            return [channel.pack(_failed(message, error, str(error)))]
        except Exception as error:  # a foreign runtime may raise anything; the parent decides what it means
            if not is_out_of_memory(error):
                traceback.print_exc()
            return [channel.pack(_failed(message, error, f"{type(error).__name__}: {error}"))]

    def _load(self, message: LoadEngine) -> list[Buffer]:
        _limit_threads(message.threads)
        began_at = clock.now()
        kind = cast(EngineName, message.engine)
        if not self._engines and not self._generative:  # whatever is frozen later may be what calls have left
            with settled_imports():
                import_runtime(kind, generates=message.generation is not None)
        _check_digest(message)
        engine, slots = self._loaded(message, kind)
        _give_back_memory()
        self._meter.loaded()
        load_s, meter = clock.now() - began_at, device_meter_of(engine)
        held, device = (self._meter.resident_bytes(), None) if meter is None else (meter.held_bytes, meter.device_bytes)
        return [channel.pack(EngineLoaded(message.id, load_s, held, device, slots))]

    def _loaded(self, message: LoadEngine, kind: EngineName) -> tuple[Engine | GenerativeEngine, int]:
        """The engine, which is kept under its key, and its slots."""
        if message.generation is not None:
            generative = load_generative_engine(
                kind,
                Path(message.artefact),
                limits=message.generation,
                threads=message.threads,
                device=message.device,
                paced_slow=message.paced_slow,
            )
            self._engines.pop(message.key, None)
            self._generative[message.key] = generative
            return generative, generative.slots
        engine = _with_steps(message, kind)
        self._generative.pop(message.key, None)
        self._engines[message.key] = engine
        if getattr(engine, "prepares", False):
            self._inbox.read_ahead(self.prepare)
        return engine, 0

    def _infer(self, message: RunEngine, arrays: Arrays) -> list[Buffer]:
        engine = self._engines.get(message.key)
        if engine is None:
            raise EngineError(f"no engine is loaded under {message.key!r}")
        if message.budget_s is not None and isinstance(engine, PipelineEngine):
            engine = engine.within(message.budget_s)
        outputs, compute_s, peak_bytes = self._meter.run(message.key, engine, arrays)
        return self._handover.frame(
            RunCompleted(message.id, compute_s, peak_bytes=peak_bytes, gc_s=self._collections.take_s()),
            channel.lay_out(outputs),
        )

    def __repr__(self) -> str:
        return f"<ComputeServer pid {os.getpid()} engines {sorted(self._engines)}>"


def _check_digest(message: LoadEngine) -> None:
    """Raise EngineError where the file is another one than was checked when its model began to serve."""
    artefact = Path(message.artefact)
    try:
        digest = sha256_of(artefact) if message.sha256 and artefact.is_file() else message.sha256
    except OSError as error:
        raise EngineError(f"{artefact}: it cannot be read: {error.strerror or error}") from error
    if digest != message.sha256:
        raise EngineError(f"{artefact}: has sha256 {digest}, but the manifest names {message.sha256}")


def _with_steps(message: LoadEngine, kind: EngineName) -> Engine:
    """The engine that computes one call after another, with the steps around it. Raises EngineError."""
    if message.steps is not None and not kind:
        return PipelineEngine(message.steps)
    engine = load_engine(
        kind,
        Path(message.artefact),
        outputs=message.outputs,
        threads=message.threads,
        device=message.device,
        paced_slow=message.paced_slow,
        packing=message.packing,
        compile=message.compile,
    )
    return engine if message.steps is None else PipelineEngine(message.steps, engine)


def _failed(message: LoadEngine | RunEngine, error: Exception, words: str) -> RunFailed:
    return RunFailed(message.id, channel.shorten(words), out_of_memory=is_out_of_memory(error))


def send(sock: socket.socket, parts: Sequence[Buffer]) -> None:
    """Send all parts as one: each part on its own would wake the parent, on another core, to find half a frame."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        sent = sock.sendmsg(left[:_PARTS])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def _give_back_memory() -> None:
    """Return to the system what loading took and has freed: some 10 MB of a small ONNX model stay otherwise."""
    with suppress(AttributeError, OSError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _limit_threads(threads: int) -> None:
    """Bound the pools that runtimes size by the environment when they are first imported. 0 leaves them all cores."""
    if threads <= 0:
        return
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)


def _give_up_rights() -> None:
    """What a model's runtime never needs: a dump of all inputs on disk when it crashes, and privileges by exec.

    Its memory is bounded by who watches it (`memory_limit_bytes`, recycling) and by the service's control group, not by
    RLIMIT_AS: CUDA reserves terabytes of addresses, and ONNX Runtime ends the process where an mmap fails.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def main(arguments: list[str]) -> NoReturn:
    """`python -m tidegate.workers.child FD PARENT_PID CORES INPUT_FDS OUTPUT_FDS SHARE_FROM_BYTES SCRATCH`"""
    fd, parent_pid, cores = int(arguments[0]), int(arguments[1]), arguments[2]
    incoming, outgoing, share_from_bytes = _numbers(arguments[3]), _numbers(arguments[4]), int(arguments[5])
    die_with_parent(parent_pid, by=signal.SIGKILL)
    _give_up_rights()
    if scratch := arguments[6]:
        sandbox.enter(Path(scratch))
    if cores:  # before any thread is there: they inherit it
        os.sched_setaffinity(0, _numbers(cores))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    handover = Handover(Outgoing(outgoing), Incoming(incoming), share_from_bytes=share_from_bytes)
    inbox = CallInbox(CallFrames(sock, handover))
    worker = ComputeServer(sock, handover, inbox)
    end_with_parent(inbox, sock.fileno(), worker.prepare)
    try:
        worker.serve()
    except (EOFError, FrameError, OSError, UnexpectedMessage, MemoryError) as error:
        end_process(error)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


if __name__ == "__main__":
    main(sys.argv[1:])
