"""A part of the system that does as its configuration says, for the tests of `tidegate.tools.up.children`.

Keys: `before_ready` (`fail`: say why and exit 1 · `crash`: print to stderr and exit 3 · `import`: a package that is not
installed), `deaf` (ignore SIGTERM),
`worker` (start a process that sleeps, and tell its pid), `print` (a line that is no event).
"""

from __future__ import annotations

import argparse
import importlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tidegate.runtime import events
from tidegate.runtime.lifeline import die_with_parent


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--config", type=Path)
    arguments.add_argument("--die-with-parent", type=int)
    chosen = arguments.parse_args()
    die_with_parent(chosen.die_with_parent)
    behave(yaml.safe_load(chosen.config.read_text()))


def behave(how: dict[str, Any]) -> None:
    if how.get("before_ready") == "fail":
        events.emit("failed", reason="port 8005 is taken (key grpc_port)")
        sys.exit(1)
    if how.get("before_ready") == "crash":
        print("first words\nlast words", file=sys.stderr)
        sys.exit(3)
    if how.get("before_ready") == "import":
        importlib.import_module("package_of_an_extra.part")
    if how.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how.get("print"):
        print(how["print"], flush=True)
    if how.get("worker"):
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
        events.emit("worker", pid=worker.pid)
    events.emit("progress", what="warming up")
    events.emit("ready", role="edge", name="fake")
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
