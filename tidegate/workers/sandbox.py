"""The sandbox takes the network and the disk from a worker process, with what an unprivileged Linux kernel offers.

A model's program computes what its author likes, with the worker's rights; so the worker gets few. It is entered before
any thread and any foreign code is there, it holds for all that the worker starts, and it cannot be left.

    network   seccomp: no sockets are made (with a GPU: local ones, as its driver may want), no io_uring, which could
              make them; no tracing of other processes. Landlock: no TCP besides, where the kernel has it
    files     Landlock: written is a scratch folder of the worker's own, which goes with it, and what a runtime needs of
              /dev and of its own /proc. It may not trace or signal processes outside of the sandbox
    rights    root's capabilities, but for those that reading files and locking memory take

What it leaves: files can be read, processor and memory be used up (`watchdog.py`, `recycling.py`), and the parent gets
whatever answers the program likes. The sockets and segments to the parent were made before, and stay.

`auto` uses what is there and says what is missing; `require` refuses to start without all of it; `off` does nothing.

Source: landlock(7); seccomp(2); linux/filter.h, linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

SandboxMode = Literal["auto", "off", "require"]

_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_GET_SECCOMP: Final = 21
_LANDLOCK_CREATE_RULESET: Final = 444  # the same number on every architecture
_LANDLOCK_ADD_RULE: Final = 445
_LANDLOCK_RESTRICT_SELF: Final = 446
_RULE_PATH_BENEATH: Final = 1
_VERSION: Final = 1
_WRITE_FILE: Final = 1 << 1
_REMOVE_AND_MAKE: Final = sum(1 << bit for bit in range(4, 13))
_REFER: Final = 1 << 13  # ABI 2
_TRUNCATE: Final = 1 << 14  # ABI 3
_TCP: Final = 0b11  # ABI 4: bind and connect
_SCOPES: Final = 0b11  # ABI 6: abstract sockets and signals
_LEAST_ABI: Final = 3  # before it, a file that cannot be written could be truncated
_SECCOMP_SET_MODE_FILTER: Final = 1
_TSYNC_AND_SPEC_ALLOW: Final = 0b101  # all threads; without the slowdown that some kernels add to a filter
_EPERM_RETURNED: Final = 0x00050000 | 1
_ALLOW: Final = 0x7FFF0000
_LOAD, _IS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF's codes
_AF_UNIX: Final = 1
_KEPT_CAPABILITIES: Final = (1, 2, 14, 23, 24)  # DAC_OVERRIDE, DAC_READ_SEARCH, IPC_LOCK, SYS_NICE, SYS_RESOURCE
_CAPABILITY_VERSION: Final = 0x20080522
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "dri", "kfd", "dxg")
_GPUS: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu")


@dataclass(frozen=True, slots=True)
class _Calls:
    """The numbers of system calls on one architecture; `audit` is its own in filters."""

    audit: int
    seccomp: int
    socket: int
    refused: tuple[int, ...]


# Refused: ptrace, process_vm_readv, process_vm_writev, perf_event_open, bpf, kexec_load, pidfd_getfd, io_uring_setup,
# userfaultfd, open_by_handle_at, keyctl.
_CALLS: Final = {
    "x86_64": _Calls(0xC000003E, 317, 41, (101, 310, 311, 298, 321, 246, 438, 425, 323, 304, 250)),
    "aarch64": _Calls(0xC00000B7, 277, 198, (117, 270, 271, 241, 280, 104, 438, 425, 282, 265, 219)),
}


@cache
def missing_here() -> tuple[str, ...]:
    """What of the sandbox this machine cannot do, as phrases for people; () where it can do all."""
    if sys.platform != "linux":
        return ("all: it is built for Linux alone",)
    missing = []
    if (abi := _landlock_abi()) < _LEAST_ABI:
        what = f"ABI {abi}" if abi > 0 else "none"
        missing.append(f"files: Landlock ABI {_LEAST_ABI} (Linux 6.2, and in the kernel's `lsm=`), here {what}")
    if platform.machine() not in _CALLS or _libc().prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        missing.append(f"network: seccomp, known for {' and '.join(_CALLS)}, here {platform.machine()}")
    return tuple(missing)


def enter(scratch: Path) -> None:
    """Enter the sandbox, for this process and all that it starts. Before there are threads.

    Args:
        scratch: the folder that may be written.

    Raises:
        OSError: the kernel refuses a part that it offers; the process must not go on.
    """
    _move_caches(scratch)
    if sys.platform != "linux":
        return
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if (abi := _landlock_abi()) >= _LEAST_ABI:
        _restrict_files(scratch, abi)
    _drop_capabilities()
    if (calls := _CALLS.get(platform.machine())) is not None and _libc().prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0:
        _filter_calls(calls, local_sockets=any(map(os.path.exists, _GPUS)))


def filter_program(calls: _Calls, *, local_sockets: bool) -> bytes:
    """The instructions of the system call filter, as the kernel takes them."""
    lines = [(_LOAD, 0, 0, 4), (_IS, 1, 0, calls.audit), (_RETURN, 0, 0, _EPERM_RETURNED), (_LOAD, 0, 0, 0)]
    if calls.audit == _CALLS["x86_64"].audit:  # x32 has the same calls under other numbers
        lines += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM_RETURNED)]
    for number in calls.refused:
        lines += [(_IS, 0, 1, number), (_RETURN, 0, 0, _EPERM_RETURNED)]
    if local_sockets:
        lines += [(_IS, 0, 3, calls.socket), (_LOAD, 0, 0, 16), (_IS, 1, 0, _AF_UNIX)]
    else:
        lines += [(_IS, 0, 1, calls.socket)]
    lines += [(_RETURN, 0, 0, _EPERM_RETURNED), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def _filter_calls(calls: _Calls, *, local_sockets: bool) -> None:
    program = ctypes.create_string_buffer(content := filter_program(calls, local_sockets=local_sockets), len(content))
    header = struct.pack("@HP", len(content) // 8, ctypes.addressof(program))
    taken = _libc().syscall(calls.seccomp, _SECCOMP_SET_MODE_FILTER, _TSYNC_AND_SPEC_ALLOW, header)
    _check(taken, "the filter of system calls (seccomp)")


def _landlock_abi() -> int:
    return int(_libc().syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION))


def _restrict_files(scratch: Path, abi: int) -> None:
    files = _WRITE_FILE | _REMOVE_AND_MAKE | _REFER | _TRUNCATE
    attributes = struct.pack("<QQQ", files, _TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    attributes = attributes[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = _libc().syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(rules, "the restriction of files (Landlock)")
    try:
        _allow(rules, scratch, files)
        for path in _written_by_runtimes():
            _allow(rules, path, _WRITE_FILE | _TRUNCATE)
        _check(_libc().syscall(_LANDLOCK_RESTRICT_SELF, rules, 0), "the restriction of files (Landlock)")
    finally:
        os.close(rules)


def _written_by_runtimes() -> Iterator[Path]:
    """Devices, and this process' own folder in /proc: threads' names, and the peak of its memory."""
    yield from (path for name in _DEVICES if (path := Path("/dev", name)).exists())
    yield from Path("/dev").glob("nv*")
    yield Path(f"/proc/{os.getpid()}")


def _allow(rules: int, path: Path, access: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("<Qi", access, folder)
        _check(_libc().syscall(_LANDLOCK_ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0), f"the rule for {path}")
    finally:
        os.close(folder)


def _drop_capabilities() -> None:
    """Root without them owns files and nothing else. Raises OSError."""
    header, held = struct.pack("<Ii", _CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    _check(_libc().capget(header, held), "capabilities")
    effective, permitted, *_ = struct.unpack("<6I", held.raw)
    kept = sum(1 << one for one in _KEPT_CAPABILITIES)
    # Those from 32 on go altogether.
    _check(_libc().capset(header, struct.pack("<6I", effective & kept, permitted & kept, 0, 0, 0, 0)), "capabilities")


def _move_caches(scratch: Path) -> None:
    """What runtimes would keep under the home folder and /tmp is kept in the scratch folder, and goes with it."""
    os.environ["TMPDIR"] = str(scratch)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME"):
        os.environ[name] = str(scratch / name.lower())


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"sandbox: {what}: {os.strerror(number)}")
