"""A Kubernetes API server with the EndpointSlices of a test, on kmock's server: versions, watches and faults.

kmock parses Kubernetes' URLs and streams; what its emulator leaves out is here: versions by which a watch is resumed,
selectors, pages, bookmarks, and a log that forgets.

    python -m tests.support.discovery.cluster_api PODS      serves one on port 8009, to try things without a cluster

PODS is a file with a line for each pod, NAME ADDRESS:PORT ready|terminating, and is followed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import kmock
from kmock import KubernetesError, KubernetesScaffold, Request

from tidegate import clock
from tidegate.testing.ports import free_port

SLICES = "discovery.k8s.io/v1/endpointslices"
SERVICE = "kubernetes.io/service-name"


def endpoint(name: str, address: str, *, zone: str = "", **conditions: bool) -> dict[str, Any]:
    """A pod's endpoint; ready unless said otherwise."""
    said = {"ready": True, "serving": True, "terminating": False, **conditions}
    found = {"addresses": [address], "conditions": said, "targetRef": {"kind": "Pod", "name": name}}
    return {**found, "zone": zone} if zone else found


def slice_of(name: str, port: int, *endpoints: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The EndpointSlice `name` of the Service `pools`."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "prod", "labels": {SERVICE: "pools"}},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
        **more,
    }


class ClusterApi:
    """`async with` serves. `put` and `remove` slices; `fault` is the status of all answers, 0 for none.

    `stop` and `start` end the server, with its connections, and begin it again at the same address.
    """

    def __init__(self, port: int = 0, *, service: str = "pools") -> None:
        self._service = service
        self.fault = 0
        self.watch_fault = 0  # as an event, once a watch stands
        self.asked: Counter[str] = Counter()  # "list" and "watch"
        self.tokens: list[str] = []  # as shown, in order
        self.from_versions: list[str] = []  # at which watches began
        self.raw_events: list[bytes] = []  # sent as they are, before others
        self.silent = False  # watches bring nothing
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._log: list[tuple[int, dict[str, Any]]] = []
        self._known_from = 0
        self._news = asyncio.Event()
        self._round = 0  # of watches
        self._port = port or free_port()
        self._kmock: KubernetesScaffold | None = None
        self._server = AsyncExitStack()
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._kmock = await self._stack.enter_async_context(KubernetesScaffold())
        self._kmock[kmock.action.LIST] << self._list
        self._kmock[kmock.action.WATCH] << self._watch
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self._stack.aclose()

    async def start(self) -> None:
        await self._server.enter_async_context(kmock.Server(self._kmock, port=self._port))

    async def stop(self) -> None:
        self.cut_watches()
        await self._server.aclose()

    def put(self, one: dict[str, Any]) -> None:
        name = one["metadata"]["name"]
        self._record("MODIFIED" if name in self._slices else "ADDED", one)
        self._slices[name] = one

    def remove(self, name: str) -> None:
        self._record("DELETED", self._slices.pop(name))

    def forget_log(self) -> None:
        """Watches from any version up to now get 410, as after a compaction of etcd."""
        self._version += 1
        self._known_from = self._version
        self._log.clear()

    def bookmark(self) -> None:
        self._version += 1
        meta = {"resourceVersion": str(self._version)}
        self._log.append((self._version, {"type": "BOOKMARK", "object": {"metadata": meta}}))
        self._wake()

    def cut_watches(self) -> None:
        """Every watch ends now."""
        self._round += 1
        self._wake()

    def _record(self, kind: str, one: dict[str, Any]) -> None:
        self._version += 1
        one["metadata"]["resourceVersion"] = str(self._version)
        self._log.append((self._version, {"type": kind, "object": one}))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _note(self, what: str, request: Request) -> None:
        self.asked[what] += 1
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.fault:
            raise KubernetesError(status=self.fault, message=f"a fault of the test: {self.fault}")

    def _list(self, request: Request) -> dict[str, Any]:
        self._note("list", request)
        assert request.params["labelSelector"] == f"{SERVICE}={self._service}" and request.namespace == "prod"
        found = [self._slices[name] for name in sorted(self._slices)]
        begin, most = int(request.params.get("continue", 0)), int(request.params["limit"])
        left = len(found) - begin - most
        page = {"continue": str(begin + most)} if left > 0 else {}
        meta = {"resourceVersion": str(self._version), **page}
        return {"kind": "EndpointSliceList", "metadata": meta, "items": found[begin : begin + most]}

    async def _watch(self, request: Request) -> AsyncIterator[Any]:
        self._note("watch", request)
        assert request.params["labelSelector"] == f"{SERVICE}={self._service}" and request.namespace == "prod"
        version, this_round = int(request.params["resourceVersion"]), self._round
        self.from_versions.append(request.params["resourceVersion"])
        until = clock.now() + int(request.params["timeoutSeconds"])
        yield b""
        if version < self._known_from:
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
            return
        for raw in self.raw_events:
            yield raw
        if self.watch_fault:
            yield {"type": "ERROR", "object": {"kind": "Status", "code": self.watch_fault, "message": "of the test"}}
            return
        while clock.now() < until and this_round == self._round:
            news = self._news
            for at, event in list(self._log):
                if at > version and not self.silent:
                    version = at
                    yield event
            try:
                async with asyncio.timeout_at(until):
                    await news.wait()
            except TimeoutError:
                return


async def serve(pods: Path) -> None:
    """Serve the pods of the file until cancelled."""
    async with ClusterApi(port=8009) as api:
        print(f"serving the EndpointSlices of prod/pools at {api.url}", flush=True)
        said: dict[str, str] = {}
        while True:
            text = await asyncio.to_thread(pods.read_text)
            lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
            for name in said.keys() - lines.keys():
                api.remove(name)
            for name, line in lines.items():
                if said.get(name) != line:
                    _, address, state = line.split()
                    host, _, port = address.rpartition(":")
                    ends = {"ready": False, "terminating": True} if state == "terminating" else {}
                    api.put(slice_of(name, int(port), endpoint(name, host, **ends)))
            said = lines
            await clock.sleep(0.2)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
