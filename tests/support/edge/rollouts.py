"""The other side of a rollout: an author who signs, versions of a tiny model, and a server that misbehaves.

author = Author(); model = made(folder, "2", factor=2.0); server.add(model)
message = author.message(1, model.plan(), urls=[server.url])
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace
from onnx import TensorProto, helper

from tests.support.models.artefacts import artefact_of
from tests.support.models.tiny_models import double_manifest
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.models.repository import manifest_text
from tidegate.rollout.canonical import digest_of
from tidegate.rollout.desired import DesiredDocument
from tidegate.rollout.golden import encode_golden
from tidegate.rollout.plan import Artefact, ModelPlan, Probe, Soak
from tidegate.rollout.signing import sign_document
from tidegate.security.attestation.keys import line_of
from tidegate.types import Datatype

CHUNK = 4096
QUICK = Soak(duration_s=0.0)  # commits as soon as it answers
_IR_VERSION, _OPSET = 9, 17


class Author:
    """An author with a signing key."""

    def __init__(self, seed: int = 1) -> None:
        self.key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)

    def trust_file(self, path: Path) -> Path:
        path.write_text(f"{line_of(self.key, 'author')}\n")
        path.chmod(0o600)
        return path

    def message(
        self,
        revision: int,
        *plans: ModelPlan,
        device: str = "kiosk-1",
        urls: Sequence[str] = (),
        signers: Sequence[Ed25519PrivateKey] = (),
        **keys: Any,
    ) -> bytes:
        """A document that asks for this version of `double`, signed by this author, or by these signers."""
        models = dict(zip(("double",), plans, strict=False))
        target = {} if "group" in keys else {"device": device}
        issued_s = keys.pop("issued_s", 1_763_775_000)
        desired = DesiredDocument(revision, issued_s, models=models, urls=tuple(urls), **target, **keys)
        return sign_document(desired, signers or [self.key])


@dataclass(frozen=True, slots=True)
class Made:
    """A version of `double`: its plan's pieces and their bytes by digest."""

    version: str
    files: tuple[Artefact, ...]
    golden: Artefact
    contents: Mapping[str, bytes] = field(repr=False)

    def plan(self, **changes: Any) -> ModelPlan:
        """Commits at once, unless told otherwise."""
        (manifest,) = (one.sha256 for one in self.files if one.path == "model.yaml")
        return ModelPlan(self.version, manifest, self.files, **({"soak": QUICK} | changes))

    def probe(self, **bounds: Any) -> Probe:
        return Probe(golden=self.golden, **bounds)


def made(
    version: str, *, factor: float = 2.0, wrong: float = 0.0, rounds: int = 0, padding_bytes: int = 0, **bend: Any
) -> Made:
    """A model that answers `factor` times its input, `wrong` beside what its golden cases say.

    Args:
        rounds: of matrix products that it does for nothing, to be slow.
        padding_bytes: of weights that nobody needs, to be large.
        bend: `manifest`, a change of the manifest; `model`, the bytes instead of the graph's.
    """
    graph = bend.get("model", _graph(factor + wrong, rounds, padding_bytes).SerializeToString())
    weights = artefact_of("int8.onnx", graph, max(CHUNK, len(graph) // 100))
    (variant,) = double_manifest().variants
    variant = replace(variant, sha256=weights.sha256, size_bytes=weights.size_bytes, max_batch=4, max_tokens=16)
    change: Callable[[Manifest], Manifest] = bend.get("manifest", lambda manifest: manifest)
    manifest = change(replace(double_manifest(), version=version, variants=(variant,)))
    text = manifest_text(manifest).encode()
    x = np.arange(8, dtype=np.float32).reshape(1, 8)
    cases = encode_golden([({"x": x}, {"y": factor * x})], {"x": Datatype.FP32, "y": Datatype.FP32})
    described, golden = artefact_of("model.yaml", text, CHUNK), artefact_of("golden", cases, CHUNK)
    contents = {weights.sha256: graph, described.sha256: text, golden.sha256: cases}
    return Made(version, (described, weights), golden, contents)


def _graph(factor: float, rounds: int, padding_bytes: int) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "width"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "width"])
    nodes = [helper.make_node("Mul", ["x", "factor"], ["y" if not rounds else "scaled"])]
    weights = [helper.make_tensor("factor", TensorProto.FLOAT, [1], [factor])]
    if rounds:
        # zeros · zeros, over and over, added in the end, so that no optimizer can leave it out
        side = 256
        shape = helper.make_tensor("shape", TensorProto.INT64, [2], [side, side])
        zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])
        weights += [shape, zero]
        nodes += [
            helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
            helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
            helper.make_node("Expand", ["nothing", "shape"], ["m0"]),
            *(helper.make_node("MatMul", [f"m{n}", f"m{n}"], [f"m{n + 1}"]) for n in range(rounds)),
            helper.make_node("ReduceSum", [f"m{rounds}"], ["slowly"], keepdims=0),
            helper.make_node("Add", ["scaled", "slowly"], ["y"]),
        ]
    if padding_bytes:
        noise = np.random.default_rng(7).integers(0, 256, padding_bytes, dtype=np.uint8).tobytes()
        weights.append(helper.make_tensor("padding", TensorProto.UINT8, [padding_bytes], noise, raw=True))
    graph = helper.make_graph(nodes, "double", [x], [y], weights)
    return helper.make_model(graph, ir_version=_IR_VERSION, opset_imports=[helper.make_opsetid("", _OPSET)])


class ArtefactServer:
    """Serves artefacts over HTTP/1.1 with ranges, in a thread, and misbehaves as told.

    Attributes:
        cut_after: bytes of body after which the next connection is cut, taken one by one from the front.
        status: answered instead, per digest. tampered: digests whose bytes come changed.
        sent_bytes: of bodies, in all.
    """

    def __init__(self) -> None:
        self.cut_after: list[int] = []
        self.status: dict[str, int] = {}
        self.tampered: set[str] = set()
        self.ranges = True
        self.slow_s = 0.0  # before each piece
        self.sent_bytes = 0
        self.requests: list[tuple[str, str]] = []  # digest, Range
        self.contents: dict[str, bytes] = {}
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def add(self, *models: Made) -> None:
        for one in models:
            self.contents |= one.contents

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None and self._thread is not None
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        digest = handler.path.rpartition("/")[2]
        wanted = handler.headers.get("Range", "")
        self.requests.append((digest, wanted))
        whole = self.contents.get(digest)
        status = self.status.get(digest, 200 if whole is not None else 404)
        if status != 200 or whole is None:
            handler.send_response(status)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
        body = self._body(digest, whole)[first:]
        handler.send_response(206 if first else 200)
        if first:
            handler.send_header("Content-Range", f"bytes {first}-{len(whole) - 1}/{len(whole)}")
        handler.send_header("ETag", f'"{digest}"')
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        self._send(handler, body)

    def _send(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        cut = self.cut_after.pop(0) if self.cut_after and len(body) > self.cut_after[0] else None
        part = body if cut is None else body[:cut]
        pause = threading.Event()
        for at in range(0, len(part), 65_536):
            if self.slow_s:
                pause.wait(self.slow_s)
            try:
                handler.wfile.write(part[at : at + 65_536])
            except OSError:
                handler.close_connection = True
                return
            self.sent_bytes += len(part[at : at + 65_536])
        if cut is not None:
            handler.close_connection = True

    def _body(self, digest: str, whole: bytes) -> bytes:
        if digest not in self.tampered:
            return whole
        middle = len(whole) // 2
        return whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]


async def eventually(what: Callable[[], bool], within_s: float = 60.0, say: Callable[[], object] = str) -> None:
    """Wait for something that another task or process is about to do."""
    try:
        async with asyncio.timeout(within_s):
            while not what():
                await clock.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"it did not happen within {within_s:g} s: {say()}") from None


__all__ = ["CHUNK", "QUICK", "ArtefactServer", "Author", "Made", "digest_of", "eventually", "made"]
