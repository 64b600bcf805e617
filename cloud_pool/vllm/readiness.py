"""Whether a server that was started is ready: it says that it is well, and has given a token as it should.

The route for tokens has no version, so the first answer is asked for with all that may come with one, and checked in
all its parts. A server that speaks otherwise is refused with the version that it has, and the one that this was
written against.
"""

from __future__ import annotations

from typing import Final

import structlog

from cloud_pool.vllm.answer import ServerRefused, VllmAnswer
from cloud_pool.vllm.child_log import ChildLog
from cloud_pool.vllm.http_client import ServerGone, VllmClient
from cloud_pool.vllm.wire import GENERATE_PATH, EventLines, request_body
from tidegate import clock
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.generate.request import GenerateRequest
from tidegate.outcome import InternalError
from tidegate.workers.generation.messages import UnexpectedMessage

WRITTEN_AGAINST: Final = "0.32"
_POLL_S: Final = 0.25
_TELL_EVERY_S: Final = 15.0

log = structlog.get_logger("vllm")


async def until_ready(name: str, client: VllmClient, said: ChildLog, limits: GenerationLimits) -> str:
    """Wait for as long as it takes; the server's version.

    Args:
        name: of the worker, in the log.
        said: what the server prints, of which the last line is told now and then.

    Raises:
        InternalError: it is well, and speaks otherwise.
    """
    began_at = told_at = clock.now()
    while not await client.healthy():
        if (now := clock.now()) >= told_at + _TELL_EVERY_S:
            told_at = now
            log.info("vllm is loading", worker=name, since_s=round(now - began_at), line=said.last_line)
        await clock.sleep(_POLL_S)
    version = await client.version()
    try:
        await _first_answer(client, limits)
    except (UnexpectedMessage, ServerRefused, ServerGone) as error:
        raise InternalError(
            f"vLLM {version} does not answer {GENERATE_PATH} as {WRITTEN_AGAINST} does: {error}; install vLLM "
            f"{WRITTEN_AGAINST}, or set vllm.use to never"
        ) from error
    return version


async def _first_answer(client: VllmClient, limits: GenerationLimits) -> None:
    """Ask for one token with all that comes with it. Raises what is wrong."""
    token = next((id for id in range(limits.vocabulary_size) if id not in limits.stop_tokens), 0)
    request = GenerateRequest((token,), 1, logprobs=1, ignore_stop=True)
    answer = VllmAnswer(
        0, prompt_tokens=1, max_tokens=1, logprobs=1, stop_tokens=(), vocabulary_size=limits.vocabulary_size
    )
    lines = EventLines()
    async with client.stream(request_body(request, request.prompt, 1, limits.stop_tokens)) as data:
        async for some in data:
            for event in lines.feed(some):
                answer.take(event)
    answer.end(done=lines.done)
