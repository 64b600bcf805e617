"""One node of Ray with Serve on it, ended by its own process group: `ray stop` would end everybody's on the machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.error import URLError

from tidegate import clock

ROOT: Final = Path(__file__).parents[3]
PYTHON: Final = ROOT / ".venv-ray" / "bin" / "python"
DASHBOARD: Final = 18265
_UP_WITHIN_S: Final = 90.0


class RayCluster:
    """A head inside `with`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Names of sockets are within: a system takes 107 bytes of them, and a test's own folder is long.
        self.session = Path(tempfile.mkdtemp(prefix="ray-"))
        self._head: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RayCluster:
        words = [
            *(str(PYTHON.with_name("ray")), "start", "--head", "--block", "--node-ip-address", "127.0.0.1"),
            *("--num-cpus", "4", "--dashboard-port", str(DASHBOARD), "--object-store-memory", "80000000"),
            *("--min-worker-port", "20000", "--max-worker-port", "20999", "--disable-usage-stats"),
            *("--temp-dir", str(self.session)),
        ]
        with open(self._folder / "ray.log", "wb") as log:
            self._head = subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, cwd=ROOT
            )
        ends_at = clock.now() + _UP_WITHIN_S
        while clock.now() < ends_at:
            with suppress(URLError, OSError, ValueError):
                self.ask("/api/serve/applications/")
                return self
            time.sleep(0.5)
        self.__exit__(None, None, None)
        raise AssertionError(f"Ray is not up:\n{self.log}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._head is None:
            return
        for number, within_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            with suppress(ProcessLookupError):
                os.killpg(self._head.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._head.wait(within_s)
        shutil.rmtree(self.session, ignore_errors=True)

    @property
    def log(self) -> str:
        return (self._folder / "ray.log").read_text(errors="replace")[-3000:]

    def ask(self, path: str, body: Any = None, method: str = "GET") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{DASHBOARD}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            raw = answer.read()
        return json.loads(raw) if raw else None

    def deploy(self, **args: Any) -> None:
        """Bring the application, or update it."""
        application = {
            "name": "pool",
            "import_path": "cloud_pool.ray_serve:app",
            "external_scaler_enabled": True,
            "args": args,
        }
        self.ask("/api/serve/applications/", {"proxy_location": "Disabled", "applications": [application]}, "PUT")

    def replicas(self) -> dict[str, tuple[int, str]]:
        """By Serve's own id: pid, 0 of one that is not placed yet, and state."""
        found = self.ask("/api/serve/applications/")["applications"]
        deployments = found.get("pool", {}).get("deployments", {})
        listed = deployments.get("pool", {}).get("replicas", [])
        return {one["replica_id"]: (one.get("pid") or 0, one["state"]) for one in listed}

    def status(self) -> str:
        """Of the application, with its message."""
        one = self.ask("/api/serve/applications/")["applications"].get("pool", {})
        return f"{one.get('status')}: {one.get('message')}"
