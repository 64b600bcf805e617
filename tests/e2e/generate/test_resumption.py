"""Answers that go on elsewhere when their target dies, stalls or leaves: real links, workers and clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc

from tests.support.gateway.app import until
from tests.support.gateway.edge_pair import EdgePair, edge_pair
from tests.support.gateway.text_gateway import text_repository
from tidegate import clock

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

HELLO: Any = [{"role": "user", "content": "when does the tide come in?"}]
TOKENS = 80


def sdk(one: EdgePair) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{one.gateway.addresses['http']}/v1", api_key="any", max_retries=0)


async def undisturbed(one: EdgePair) -> Any:
    async with sdk(one) as client:
        return await client.chat.completions.create(model="talker", messages=HELLO, max_tokens=TOKENS)


async def befalls(one: EdgePair, what: str, target: str) -> None:
    """A kill, a stop or a shutdown of the edge that answers."""
    if what == "drain":
        await one.shut_down(target)
    else:
        os.kill(one.worker(target), signal.SIGKILL if what == "kill" else signal.SIGSTOP)


@pytest.mark.parametrize("what", ["kill", "stop", "drain"])
async def test_openais_sdk_streams_over_it_without_noticing(tmp_path: Path, what: str) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path, step_ms=15.0)
    async with edge_pair(tmp_path, models) as one, sdk(one) as client:
        whole = await undisturbed(one)
        stream = await client.chat.completions.create(
            model="talker",
            messages=HELLO,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        lost, chunks, ending = stream.response.headers["tidegate-served-by"], [], None
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 30:
                ending = asyncio.create_task(befalls(one, what, lost))
        assert ending is not None
        await ending

        said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(said) == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == "length"
        words = chunks[-2].model_extra["tidegate"]
        other = "edge/b" if lost == "edge/a" else "edge/a"
        assert words["tidegate-served-by"] == other
        assert words["tidegate-resumed"].startswith(f"from={lost} to={other} at=")
        assert words["tidegate-resumed"].endswith("grade=exact")
        record = next(reversed(one.gateway.dispatcher.recorder))
        assert record.answer is not None
        (resumed,) = record.answer.route.resumed
        assert resumed.why in {"kill": ("unreachable",), "stop": ("stalled", "unreachable"), "drain": ("drain",)}[what]
        await until(lambda: one.gateway.admission.in_flight == 0)


async def events_of(address: str, body: dict[str, Any], on_event: Any, **headers: str) -> list[str]:
    found: list[str] = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{address}", json=body, headers=headers) as response,
    ):
        buffered = b""
        async for part in response.content.iter_any():
            buffered += part
            *whole, buffered = buffered.split(b"\n\n")
            found += [event.decode() for event in whole]
            await on_event(len(found))
    assert not buffered
    return found


async def test_the_comment_stands_between_the_events_and_the_last_one_says_it_again(tmp_path: Path) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path, step_ms=15.0)
    async with edge_pair(tmp_path, models) as one:
        body = {"input_ids": [5, 6, 7], "parameters": {"max_tokens": TOKENS}}
        url = f"{one.gateway.addresses['http']}/v2/models/talker/generate_stream"
        killed: list[str] = []

        async def kill(events: int) -> None:
            if events >= 20 and not killed:
                running = one.busy
                killed.extend(running)
                os.kill(one.worker(running[0]), signal.SIGKILL)

        events = await events_of(url, body, kill)
        (comment,) = [event for event in events if event.startswith(":")]
        assert comment.startswith(f": tidegate-resumed from={killed[0]} to=edge/") and comment.endswith("grade=exact")
        assert 0 < events.index(comment) < len(events) - 1
        assert f'"tidegate-resumed":"{comment.removeprefix(": tidegate-resumed ")}"' in events[-1]
        said = [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]
        assert sum(len(event["output_ids"]) for event in said) == TOKENS


async def test_a_request_that_says_never_ends_with_the_reason(tmp_path: Path) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path, step_ms=15.0)
    async with edge_pair(tmp_path, models) as one, sdk(one) as client:
        stream = await client.chat.completions.create(
            model="talker",
            messages=HELLO,
            max_tokens=TOKENS,
            stream=True,
            extra_headers={"tidegate-resume": "never"},
        )
        assert "tidegate-warning" not in stream.response.headers
        seen = 0
        with pytest.raises(openai.APIError, match=r"could not be gone on with.*tidegate-resume: never"):
            async for _ in stream:
                seen += 1
                if seen == 20:
                    os.kill(one.worker(stream.response.headers["tidegate-served-by"]), signal.SIGKILL)
        with pytest.raises(openai.BadRequestError, match="must be auto or never"):
            await client.chat.completions.create(
                model="talker", messages=HELLO, extra_headers={"tidegate-resume": "sometimes"}
            )


async def test_an_answer_in_one_piece_and_tritons_stream_say_it_as_parameters(tmp_path: Path) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path, step_ms=15.0)
    async with edge_pair(tmp_path, models) as one, sdk(one) as client:
        whole = await undisturbed(one)
        asking = asyncio.create_task(
            client.chat.completions.with_raw_response.create(model="talker", messages=HELLO, max_tokens=TOKENS)
        )
        await clock.sleep(0.4)
        (lost,) = one.busy
        os.kill(one.worker(lost), signal.SIGKILL)
        raw = await asking
        assert raw.parse().choices[0].message.content == whole.choices[0].message.content
        assert raw.headers["tidegate-resumed"].startswith(f"from={lost} to=edge/")


def test_tritons_last_response_says_it(tmp_path: Path) -> None:
    async def lives() -> None:
        models = await asyncio.to_thread(text_repository, tmp_path, step_ms=15.0)
        async with edge_pair(tmp_path, models) as one:
            loop = asyncio.get_running_loop()
            answers: asyncio.Queue[Any] = asyncio.Queue()
            tensor = triton_grpc.InferInput("text_input", [1], "BYTES")
            tensor.set_data_from_numpy(np.array([b"the tide"], dtype=object))

            def told(result: Any, error: Any) -> None:
                loop.call_soon_threadsafe(answers.put_nowait, error or result.get_response())

            with triton_grpc.InferenceServerClient(one.gateway.addresses["grpc"]) as client:
                client.start_stream(callback=told)
                client.async_stream_infer(
                    "talker", [tensor], parameters={"max_tokens": TOKENS}, enable_empty_final_response=True
                )
                parts = [await answers.get()]
                (lost,) = one.busy
                os.kill(one.worker(lost), signal.SIGKILL)
                while not parts[-1].parameters["triton_final_response"].bool_param:
                    parts.append(await answers.get())
                await asyncio.to_thread(client.stop_stream)
            ids = [id for part in parts for id in triton_grpc.InferResult(part).as_numpy("output_ids").tolist()]
            assert len(ids) == TOKENS
            assert parts[-1].parameters["tidegate-resumed"].string_param.startswith(f"from={lost} to=edge/")

    asyncio.run(lives())
