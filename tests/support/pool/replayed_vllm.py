"""A server of vLLM's token route that replays what a real one has said, as the command `vllm` of tests.

It takes the command line of `vllm serve`, listens on the Unix socket, and answers /health, /version and
/inference/v1/generate. A request that was recorded (`tests/data/vllm_exchanges.json`) gets the recorded bytes. Any
other gets tokens that follow from its prompt, in events of the same form, one each `step_s`; a sequence whose
connection is closed is counted as cancelled.

How it misbehaves is said by a file, read anew for each request, so that a test can change it: see `Misbehaviour`.
Started by `write_vllm`, which writes an executable that a configuration can name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from tidegate import clock

EXCHANGES = Path(__file__).parents[2] / "data" / "vllm_exchanges.json"
PATH = "/inference/v1/generate"


class Misbehaviour(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is other than with a server that is well."""

    step_s: float = 0.002  # between two tokens
    load_s: float = 0.0  # until it is ready
    exits: int = -1  # at its start, with this status
    version: str = "0.32.0"
    route: bool = True  # whether there is one for tokens
    broken: str = ""  # what is wrong with its answers, a name below, from the sixth token on
    ignores_sigterm: bool = False
    prints_bytes: int = 0  # at its start, without an end of a line


def write_vllm(folder: Path, **misbehaves: Any) -> Path:
    """An executable of the server, which misbehaves as `misbehave` says last."""
    folder.mkdir(parents=True, exist_ok=True)
    misbehave(folder, **misbehaves)
    command = folder / "vllm"
    root = Path(__file__).parents[3]
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m tests.support.pool.replayed_vllm {folder} "$@"\n'
    )
    command.chmod(0o755)
    return command


def misbehave(folder: Path, **how: Any) -> None:
    """From now on."""
    (folder / "new").write_bytes(msgspec.json.encode(Misbehaviour(**how)))
    (folder / "new").rename(folder / "misbehaviour.json")


def told(folder: Path) -> dict[str, Any]:
    """What the server that was started last has seen: its arguments, environment, pids, and its counts."""
    path = folder / "told.json"
    read: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return read


def tokens_of(prompt: list[int], count: int) -> list[int]:
    """What it says to a prompt that was not recorded."""
    return [3 + (sum(prompt) + 7 * at) % 900 for at in range(count)]


class ReplayedVllm:
    """The server."""

    def __init__(self, folder: Path, context: int) -> None:
        self._folder = folder
        self._context = context
        self._exchanges = {
            json.dumps(one["request"], sort_keys=True): one
            for one in json.loads(EXCHANGES.read_text())["exchanges"]
            if one["path"] == PATH and one["request"]
        }
        self._counts = {"asked": 0, "running": 0, "cancelled": 0, "made": 0}
        self._dead = False

    @property
    def how(self) -> Misbehaviour:
        return msgspec.json.decode((self._folder / "misbehaviour.json").read_bytes(), type=Misbehaviour)

    def tell(self, **more: Any) -> None:
        known = told(self._folder) | self._counts | more
        path = self._folder / "told.new"
        path.write_text(json.dumps(known))
        path.rename(self._folder / "told.json")

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._dead else 200)

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.how.version})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if not self.how.route:
            raise web.HTTPNotFound(text='{"detail":"Not Found"}')
        body = await request.json()
        self._counts["asked"] += 1
        recorded = self._exchanges.get(json.dumps(body, sort_keys=True))
        if recorded is not None and not self.how.broken:
            return await self._replay(request, recorded)
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self._counts["running"] += 1
        self.tell()
        try:
            await self._stream(response, body)
        except (asyncio.CancelledError, ConnectionError):
            self._counts["cancelled"] += 1
            raise
        finally:
            self._counts["running"] -= 1
            self.tell()
        return response

    async def _replay(self, request: web.Request, recorded: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=recorded["status"], headers={"content-type": recorded["type"]})
        await response.prepare(request)
        *events, rest = recorded["body"].split("\n\n")
        for event in events:
            await response.write(f"{event}\n\n".encode())
        await response.write(rest.encode())
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        prompt, said = body["token_ids"], body["sampling_params"]
        ids = tokens_of(prompt, min(said["max_tokens"], self._context - len(prompt)))
        for at, token in enumerate(ids):
            # One event for a token, as vLLM's engine makes them.
            await clock.sleep(self.how.step_s)
            last = at == len(ids) - 1
            if self.how.broken == "another form":
                await response.write(_line({"choices": [{"index": "0", "tokens": [token]}]}))
                return
            if (broken := self.how.broken) and at >= 5:
                await self._break(response, broken, token)
            self._counts["made"] += 1
            await response.write(event_of([token], said.get("logprobs"), "length" if last else None))
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids) + (self.how.broken == "miscounts"),
            "total_tokens": len(prompt) + len(ids),
            "prompt_tokens_details": {"cached_tokens": len(prompt) // 16 * 16},
        }
        await response.write(_line({"request_id": "r", "usage": usage, "output_mode": "tokens", "choices": []}))
        await response.write(b"data: [DONE]\n\n")

    async def _break(self, response: web.StreamResponse, broken: str, token: int) -> None:
        match broken:
            case "garbage":
                await response.write(b"data: {nonsense\n\n")
            case "no event":
                await response.write(b"<html>\n\n")
            case "endless event":
                for _ in range(64):
                    await response.write(b"x" * 65536)
            case "foreign token":
                await response.write(event_of([1 << 30], None, None))
            case "too many":
                await response.write(event_of([token] * 5000, None, None))
            case "ends early":
                await response.write(b"data: [DONE]\n\n")
                await response.write_eof()
                raise ConnectionResetError
            case "closes":
                assert response._req is not None and response._req.transport is not None  # noqa: SLF001
                response._req.transport.abort()  # noqa: SLF001
                raise ConnectionResetError
            case "aborts":
                await response.write(event_of([], None, "abort"))
            case "refuses":
                await response.write(_line({"error": {"message": "not like this", "type": "B", "code": 400}}))
            case "engine dead":
                self._dead = True
                await response.write(_line({"error": {"message": "EngineCore encountered an issue.", "code": 500}}))
            case "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            case _:
                assert broken == "miscounts", broken


def event_of(ids: list[int], logprobs: int | None, finish: str | None) -> bytes:
    """An event with tokens, as vLLM 0.32 writes one."""
    content = [
        {
            "token_id": one,
            "logprob": -0.5,
            "rank": 1,
            "top_logprobs": [
                {"token_id": one + place, "logprob": -0.5 - place, "rank": 1 + place}
                for place in range(max(1, logprobs or 0))
            ],
        }
        for one in ids
    ]
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": None if logprobs is None else {"content": content},
    }
    return _line({"request_id": "r", "usage": None, "output_mode": "tokens", "choices": [choice]})


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


async def serve(folder: Path, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("--uds", "--max-model-len"):
        parser.add_argument(name, required=True)
    said, _ = parser.parse_known_args(arguments)
    server = ReplayedVllm(folder, int(said.max_model_len))
    how = server.how
    # As vLLM's engine, which has a process of its own that holds the GPU.
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(1000)")
    server.tell(arguments=arguments, environment=dict(os.environ), pid=os.getpid(), engine=engine.pid)
    print("INFO loading the model, as a server does", flush=True)
    if how.prints_bytes:
        print("x" * how.prints_bytes, flush=True)
    if how.exits >= 0:
        print("RuntimeError: no room for the model", file=sys.stderr, flush=True)
        engine.kill()
        sys.exit(how.exits)
    if how.ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await clock.sleep(how.load_s)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/health", server.health)
    app.router.add_get("/version", server.version)
    app.router.add_post(PATH, server.generate)
    runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, said.uds).start()
    ended = asyncio.Event()
    if not how.ignores_sigterm:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    engine.kill()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2:]))
