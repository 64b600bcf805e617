"""LangChain's chat and completion models, unmodified, against a server of ours; prints what they saw as JSON.

Run by an interpreter that has langchain-openai: `python langchain_client.py HTTP_URL MODEL MAX_TOKENS`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

MESSAGES = [SystemMessage("be brief"), HumanMessage("when does the tide come in?")]
PROMPT = "the tide"


def seen(message: Any, parts: int) -> dict[str, Any]:
    usage = message.usage_metadata
    return {
        "text": message.content,
        "parts": parts,
        "usage": [usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]],
        "finish_reason": message.response_metadata["finish_reason"],
        "served_by": message.response_metadata.get("headers", {}).get("tidegate-served-by"),
    }


def added(chunks: list[AIMessageChunk]) -> dict[str, Any]:
    """A stream's chunks as LangChain adds them up."""
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return seen(whole, sum(1 for chunk in chunks if chunk.content))


async def main(url: str, model: str, max_tokens: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "any", "model": model, "max_retries": 0}
    chat = ChatOpenAI(
        **settings, temperature=0, max_tokens=max_tokens, stream_usage=True, include_response_headers=True
    )
    plain = OpenAI(**settings, temperature=0, max_tokens=max_tokens)
    found: dict[str, Any] = {
        "invoke": seen(chat.invoke(MESSAGES), 1),
        "stream": added(list(chat.stream(MESSAGES))),
        "astream": added([chunk async for chunk in chat.astream(MESSAGES)]),
        "batch": [message.content for message in chat.batch([MESSAGES] * 3)],
        "completion": plain.invoke(PROMPT),
        "completion_stream": list(plain.stream(PROMPT)),
    }
    leaving = chat.stream(MESSAGES)
    found["left_after"] = next(leaving).content
    leaving.close()
    try:
        chat.invoke([HumanMessage("tide " * 2000)])
    except openai.BadRequestError as error:
        found["error"] = [type(error).__name__, error.code, str(error)]
    return found


print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
