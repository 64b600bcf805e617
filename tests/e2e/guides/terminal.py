"""A terminal: a shell in which commands are typed one after another, and what each of them prints.

What is begun with `&` goes on, as does a command that nothing waits for; both end with the terminal. Variables that are
exported hold for what is typed later, and `%2` is the second program that was begun.
"""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path
from queue import Empty, Queue
from typing import Final

import psutil

from tests.support.processes import has_ended

WITHIN_S: Final = 120.0
ENDS_WITHIN_S: Final = 30.0


class Typed:
    """A command that was typed; it goes on printing as long as it or what it began runs."""

    def __init__(self, text: str, path: Path) -> None:
        self.text = text
        self.code: int | None = None  # with which it ended
        self._path = path

    @property
    def printed(self) -> str:
        return self._path.read_text(errors="replace") if self._path.exists() else ""

    def __repr__(self) -> str:
        return f"$ {self.text}\n{self.printed[-4000:]}"


class Terminal:
    """`folder` gets a file with what each command printed; `shell` is the command that starts a bash."""

    def __init__(self, shell: list[str], folder: Path, where: Path, environment: dict[str, str]) -> None:
        folder.mkdir()
        self._folder = folder
        self._ended: Queue[int] = Queue()
        self.typed: list[Typed] = []
        self._shell = subprocess.Popen(
            shell, cwd=where, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._say("set -m")  # jobs, which have numbers and can be interrupted

    def type(self, text: str) -> Typed:
        """Type a command that ends well, and wait until the shell takes another one.

        Raises:
            AssertionError: it does not end, or not well.
        """
        typed = self.tried(text)
        assert typed.code == 0, f"it ends with {typed.code}:\n{typed}"
        return typed

    def tried(self, text: str) -> Typed:
        """Type a command that may end in any way.

        Raises:
            AssertionError: it does not end.
        """
        typed = self.begin(text)
        try:
            typed.code = self._ended.get(timeout=WITHIN_S)
        except Empty:
            raise AssertionError(f"it does not end:\n{typed}") from None
        return typed

    def begin(self, text: str) -> Typed:
        """Type a command that does not end."""
        number = len(self.typed)
        script, printed = self._folder / f"{number}.sh", self._folder / f"{number}.out"
        script.write_text(f"{text}\n")
        self.typed.append(Typed(text, printed))
        self._say(f". {script} < /dev/null > {printed} 2>&1; echo $?")
        return self.typed[-1]

    def close(self) -> None:
        """End all that was begun here, by Ctrl-C, and the terminal."""
        started = psutil.Process(self._shell.pid).children() if self._shell.poll() is None else []
        deep = [one for first in started for one in [first, *first.children(recursive=True)]]
        running = [one for one in started if not has_ended(one)]  # the shell may not have waited yet for one that has
        for one in running:
            one.send_signal(2)
        _, waited_for = psutil.wait_procs(running, timeout=ENDS_WITHIN_S)
        left = [one for one in waited_for if not has_ended(one)]
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.close()
        for still in [one for one in deep if not has_ended(one)]:
            still.kill()
        try:
            self._shell.wait(timeout=ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()
        self._listener.join(ENDS_WITHIN_S)
        self._shell.stdout.close()
        assert not left, f"not ended by Ctrl-C: {left}\n{self}"

    def _say(self, line: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{line}\n")
        self._shell.stdin.flush()

    def _listen(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            if re.fullmatch(r"\d+\n", line):
                self._ended.put(int(line))

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.typed))
