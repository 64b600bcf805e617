"""A Ray cluster with Serve on it: one node, or a head and a node of its own for the replicas, with Redis behind them.

`ray stop` would end everybody's Ray on the machine; here each node is lost with its PID namespace (`RayNode`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.support.ray.node import RayNode
from tests.support.ray.serve_rest import DASHBOARD, ServeRest
from tidegate import clock

_CONTROL: Final = 18264  # the port of the control store
# Ray reads it from the environment alone, and without it ends a node once the head has been away for 60 s.
_LIVES_ON: Final = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
_UP_WITHIN_S: Final = 120.0
_STARTS: Final = 6


class RayCluster(ServeRest):
    """Inside `with`, a head that answers.

    Args:
        store: HOST:PORT of a Redis that keeps the state of the cluster. With it replicas have a node of their own, as
            production has it; without, the head is the whole cluster.
    """

    def __init__(self, folder: Path, store: str = "") -> None:
        words = ["--head", "--port", str(_CONTROL), "--dashboard-port", str(DASHBOARD)]
        environment = {**_LIVES_ON, "RAY_REDIS_ADDRESS": store} if store else {}
        cpus = "0" if store else "4"
        # Unsupervised at first, so that a lost control store does not take the head along.
        self.head = RayNode(
            "head", "127.0.0.1", folder, [*words, "--num-cpus", cpus], environment, supervised=not store
        )
        to_head = ["--address", f"127.0.0.1:{_CONTROL}", "--num-cpus", "4"]
        self.behind = RayNode("worker", "127.0.0.2", folder, to_head, _LIVES_ON) if store else None

    def __enter__(self) -> RayCluster:
        try:
            self.head.start()
            if self.behind is not None:
                self._until(lambda: socket.create_connection(("127.0.0.1", _CONTROL), 1.0).close())
                self.behind.start()  # long before the dashboard is there
            self._until(self.status)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.behind is not None:
            self.behind.kill()
        self.head.kill()

    def start_head(self) -> None:
        """As a supervisor does: once more where Ray gives up, which is after 30 s that it hard-codes.

        Returns once Serve can be asked. Raises AssertionError.
        """
        for _ in range(_STARTS - 1):
            self.head.start()
            with suppress(AssertionError):
                self._until(self.status)
                return
            self.head.kill()
        self.head.start()
        self._until(self.status)

    def _until(self, works: Callable[[], object]) -> None:
        """Return once it raises nothing. Raises AssertionError: too late, or the head has ended."""
        ends_at = clock.now() + _UP_WITHIN_S
        while clock.now() < ends_at and self.head.alive:
            with suppress(OSError, ValueError):
                works()
                return
            time.sleep(0.2)
        raise AssertionError(f"Ray is not up:\n{self.log}")

    @property
    def log(self) -> str:
        return self.head.log + (self.behind.log if self.behind is not None else "")

    def __repr__(self) -> str:
        return f"<RayCluster {self.head} {self.behind or ''}>"
