"""The warden starts vLLM's server and waits for its end, so that none of its processes outlives the pool.

vLLM is several processes, and the one that holds the GPU is not the one that was started. All are in the session that
begins here. When the pool ends, however it ends, the warden's pipe from it ends, and all of them are ended
(`session.py`) with the folder that they shared. A warden that is killed itself takes the server with it
(PR_SET_PDEATHSIG), and the pool kills what is left.

SIGTERM goes on to the server, which then shuts down by itself. The exit is the server's own: its status, or its signal.

Started by `server_process.py` as `python -m cloud_pool.vllm.warden LIFELINE_FD FOLDER CORES COMMAND…`, never by hand.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

from cloud_pool.vllm.session import kill_session, session_members
from tidegate import clock
from tidegate.runtime.lifeline import die_with_parent

CANNOT_START: Final = 127
LAST_S: Final = 3.0  # of a server whose pool is gone


def main(arguments: list[str]) -> NoReturn:
    lifeline, folder, cores, command = int(arguments[0]), arguments[1], arguments[2], arguments[3:]
    if cores:
        os.sched_setaffinity(0, [int(one) for one in cores.split(",")])
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    terms: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: terms.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warden = os.getpid()
    try:
        # This process has one thread, so code between fork and exec is safe.
        dies_along = partial(die_with_parent, warden, by=signal.SIGKILL)
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=dies_along)  # noqa: PLW1509
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(CANNOT_START)
    while server.poll() is None:
        while terms:
            server.send_signal(terms.pop())
        readable, _, _ = select.select([lifeline, woken], [], [])
        if woken in readable:
            os.read(woken, 512)
        if lifeline in readable:  # its end: nothing is ever written to it
            end_all(server, folder)
    if (status := server.returncode) < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(warden, -status)
    os._exit(abs(status))


def end_all(server: subprocess.Popen[bytes], folder: str) -> NoReturn:
    """The pool is gone: end the server, what it has started, and the folder that they shared."""
    with suppress(subprocess.TimeoutExpired):
        server.terminate()  # so that it takes its shared memory along
        server.wait(LAST_S)
    ends_at = clock.now() + LAST_S
    while clock.now() < ends_at and len(session_members(os.getpid())) > 1:
        kill_session(os.getpid(), trackers=False)
        clock.block_until(clock.now() + 0.02)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
