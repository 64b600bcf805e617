"""Real stores for tests: a redis-server on a port of its own that can be killed, stopped, flushed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.support.mqtt.brokers import BrokerProcess

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer(BrokerProcess):
    """Keeps nothing on the disk: one that was killed has forgotten everything.

    Args:
        options: of its command line, such as `--requirepass`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        self.options = options

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def _log(self) -> Path:
        return self._folder / f"store-{self.port}.log"

    def command(self) -> list[str]:
        assert REDIS is not None
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        return [REDIS, *words, "--dir", str(self._folder), *self.options]

    def is_ready(self, line: str) -> bool:
        return "Ready to accept connections" in line

    def stop_answering(self) -> None:
        """As a machine that hangs: its connections stand, and nothing comes back."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def say(self, *words: str) -> str:
        """What it answers to a command."""
        cli = shutil.which("redis-cli") or shutil.which("valkey-cli")
        assert cli is not None
        command = [cli, "-p", str(self.port), *words]
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20.0)
        return told.stdout.strip()

    def flush(self) -> None:
        self.say("FLUSHALL")
