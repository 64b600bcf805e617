"""A server of another maker as a gateway sees it: its routes, its forms, its errors, over real HTTP on loopback.

Each kind answers as the real one does, by its documentation and source as of vLLM 0.19, SGLang 0.5, llama.cpp of autumn
2026 and Ollama 0.12; llama-server's forms were recorded from the real one. What it writes is given: the ids of a text,
and a stop token behind them. It cannot be told to compute anything.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.models.text_side import END
from tidegate import clock

OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama-server": "llamacpp", "ollama": "library", "openai": "system"}
CONTEXT = 512


@dataclass
class ScriptedServer:
    """One server. What is set while it runs holds from the next request on.

    Args:
        kind: which server it is; "plain" is a service that speaks OpenAI's interface and nothing else.
        tokenizer: of the model that it serves.
        writes: each answer's text.
        incremental: of SGLang: whether events have new ids only.
        step_s: between two tokens.
        key: that requests have to show; "" for none.
    """

    kind: str
    tokenizer: Any
    writes: str = "The water is high 🌊 at noon."
    model: str = "there/talker"
    incremental: bool = False
    step_s: float = 0.0
    key: str = ""
    refusal: tuple[int, dict[str, Any], dict[str, str]] | None = None  # status, body, headers of each generation
    calls: list[dict[str, Any]] = field(default_factory=list)  # of tools, which a chat's answer makes instead
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    writing: int = 0  # answers under way
    left: int = 0  # answers that their reader did not wait for
    written: int = 0  # tokens
    tokenize_as: Any = None  # another tokenizer
    breaks_after: int = 10**9  # events, by closing the connection
    shows: Callable[[list[int]], list[str]] | None = None  # other texts of ids

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def routes(self) -> list[web.RouteDef]:
        table = [
            web.get("/v1/models", self.models),
            web.post("/v1/completions", self.generation),
            web.post("/v1/chat/completions", self.generation),
        ]
        own = {
            "vllm": [web.post("/tokenize", self.tokenize), web.post("/detokenize", self.detokenize)],
            "sglang": [web.post("/tokenize", self.tokenize), web.post("/generate", self.generation)],
            "llama-server": [
                web.post("/tokenize", self.tokenize),
                web.post("/completion", self.generation),
                web.post("/apply-template", self.apply_template),
                web.get("/props", self.props),
            ],
            "ollama": [web.get("/api/version", self.version)],
        }
        return table + own.get(self.kind, [])

    # what it says of itself

    async def models(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        name = f"{self.model}:latest" if self.kind == "ollama" else self.model
        entry: dict[str, Any] = {"id": name, "object": "model", "created": 1, "owned_by": OWNERS.get(self.kind, "me")}
        if self.kind in ("vllm", "sglang"):
            entry["max_model_len"] = CONTEXT
        headers = {"openai-version": "2020-10-01"} if self.kind == "openai" else {}
        return web.json_response({"object": "list", "data": [entry]}, headers=headers)

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.12.3"})

    async def props(self, _: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {"n_ctx": CONTEXT}, "total_slots": 3})

    async def tokenize(self, request: web.Request) -> web.Response:
        said = await request.json()
        tokenizer = self.tokenize_as or self.tokenizer
        text = said["content"] if self.kind == "llama-server" else said.get("prompt", "")
        if "messages" in said:
            text = self._template(said["messages"], open_end=said["continue_final_message"])
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if self.kind == "llama-server":
            return web.json_response({"tokens": ids})
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": CONTEXT})

    async def detokenize(self, request: web.Request) -> web.Response:
        said = await request.json()
        return web.json_response({"prompt": self.tokenizer.decode(said["tokens"], skip_special_tokens=False)})

    async def apply_template(self, request: web.Request) -> web.Response:
        said = await request.json()
        return web.json_response({"prompt": self._template(said["messages"], open_end=True)})

    @staticmethod
    def _template(messages: list[dict[str, Any]], *, open_end: bool) -> str:
        text = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
        return text.removesuffix("<|im_end|>\n") if open_end else text

    def _refused(self, request: web.Request) -> web.Response | None:
        self.keys.append(request.headers.get("Authorization", ""))
        if not self.key or self.keys[-1] == f"Bearer {self.key}":
            return None
        words = f"Incorrect API key provided: {self.keys[-1].removeprefix('Bearer ')}"
        error = {"message": words, "type": "invalid_request_error", "code": "invalid_api_key"}
        return web.json_response({"error": error}, status=401)

    # answers

    async def generation(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refused(request)) is not None:
            return refused
        body = await request.json()
        self.asked.append((request.path, body))
        if self.refusal is not None:
            status, said, headers = self.refusal
            return web.json_response(said, status=status, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self.writing += 1
        try:
            for at, event in enumerate(self._events(request.path, body)):
                if at == self.breaks_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.written += 1
                await clock.sleep(self.step_s)
            if request.path != "/completion":
                await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise
        finally:
            self.writing -= 1
        return response

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if path == "/generate":
            return self._sglangs(body)
        if path == "/completion":
            return self._llama_servers(body)
        if self.kind == "vllm" and isinstance(body.get("prompt"), list):
            return self._vllms(body)
        return self._openais(body, is_chat="messages" in body)

    def _answer(self, most: int) -> tuple[list[int], str]:
        """The ids with the stop token, and why they end."""
        ids = [*self.ids(self.writes), self.tokenizer.token_to_id(END)]
        return (ids, "stop") if len(ids) <= most else (ids[:most], "length")

    def _texts(self, ids: list[int]) -> list[str]:
        """What each id adds; a character of several comes with the last."""
        if self.shows is not None:
            return self.shows(ids)
        texts, shown = [], ""
        for count in range(1, len(ids) + 1):
            text = self.tokenizer.decode(ids[:count]).rstrip("\ufffd")
            texts.append(text[len(shown) :])
            shown = text
        return texts

    def _vllms(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        ids, why = self._answer(body["max_tokens"])
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": self.model}
        for at, (id, text) in enumerate(zip(ids, self._texts(ids), strict=True)):
            last = at == len(ids) - 1
            choice: dict[str, Any] = {
                "index": 0, "text": text, "logprobs": None, "finish_reason": why if last else None, "stop_reason": None,
                "prompt_token_ids": body["prompt"] if at == 0 else None, "token_ids": [id],
            }  # fmt: skip
            if body.get("logprobs") is not None:
                likely = {f"token_id:{id}": -0.25, "token_id:7": -2.5}
                choice["logprobs"] = {
                    "text_offset": [0], "token_logprobs": [-0.25], "tokens": [f"token_id:{id}"],
                    "top_logprobs": [likely],
                }  # fmt: skip
            yield {**head, "choices": [choice], "usage": None}
        yield {**head, "choices": [], "usage": self._usage(len(body["prompt"]), len(ids))}

    def _sglangs(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        ids, why = self._answer(body["sampling_params"]["max_new_tokens"])
        for count in range(1, len(ids) + 1):
            reason = {"type": why, "matched": ids[-1]} if why == "stop" else {"type": why, "length": count}
            rows = [[-0.25, id, None] for id in ids[:count]]
            said = {
                "id": "1", "finish_reason": reason if count == len(ids) else None,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": count, "cached_tokens": 2, "weight_version": "default",
            }  # fmt: skip
            if body.get("return_logprob"):
                said["output_token_logprobs"] = rows[-1:] if self.incremental else rows
            yield {
                "text": None,
                "output_ids": ids[count - 1 : count] if self.incremental else ids[:count],
                "meta_info": said,
            }

    def _llama_servers(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        ids, why = self._answer(body["n_predict"])
        counted = 0
        for id, text in zip(ids, self._texts(ids), strict=True):
            counted += 1
            if not text and id != self.tokenizer.token_to_id(END):
                continue  # a part of a character is not sent, and its id never
            yield {
                "index": 0, "content": text, "tokens": [id], "stop": False, "id_slot": -1,
                "tokens_predicted": counted, "tokens_evaluated": len(body["prompt"]),
            }  # fmt: skip
        yield {
            "content": "", "tokens": [], "stop": True, "stop_type": "eos" if why == "stop" else "limit",
            "tokens_predicted": counted, "tokens_evaluated": len(body["prompt"]), "timings": {"cache_n": 3},
        }  # fmt: skip

    def _openais(self, body: dict[str, Any], *, is_chat: bool) -> Iterator[dict[str, Any]]:
        ids, why = self._answer(body.get("max_tokens") or body.get("max_completion_tokens") or 10_000)
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": "x-1", "object": kind, "created": 1, "model": self.model}
        if is_chat:
            yield {**head, "choices": [_choice({"delta": {"role": "assistant", "content": ""}})]}
        for call in self.calls:
            yield {**head, "choices": [_choice({"delta": {"tool_calls": [call]}})]}
        if self.calls:
            why, ids = "tool_calls", []
        for text in self._texts(ids):
            if text:
                yield {**head, "choices": [_choice({"delta": {"content": text}} if is_chat else {"text": text})]}
        yield {**head, "choices": [_choice({"delta": {}} if is_chat else {"text": ""}, why)]}
        if body.get("stream_options", {}).get("include_usage"):
            yield {**head, "choices": [], "usage": self._usage(11, len(ids))}

    @staticmethod
    def _usage(prompt: int, completion: int) -> dict[str, Any]:
        details = {"cached_tokens": 4}
        total = prompt + completion
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
        return {**counts, "prompt_tokens_details": details}


def _choice(said: dict[str, Any], why: str | None = None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": why}


@asynccontextmanager
async def served(server: ScriptedServer, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serves on loopback; the address as OpenAI's clients take it."""
    app = web.Application()
    app.add_routes(server.routes())
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
