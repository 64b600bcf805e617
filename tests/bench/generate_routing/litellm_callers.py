"""Callers through LiteLLM's Router, in its own environment (`make peers`). See `schedule.py`.

The Router is a library here and no proxy, so that its rule is measured and not a second server. Its targets are the
ports that it would have: OpenAI's, of each edge and of one in front of the pool.
"""

# mypy: ignore-errors
import asyncio
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a list of prices at import

import litellm

from tests.bench.generate_routing.schedule import MODEL, serve

litellm.telemetry = False
litellm.suppress_debug_info = True


def ask_of(words):
    """Args: words: `targets` as (port, slots), and the `strategy`."""
    router = litellm.Router(
        model_list=[
            {
                "model_name": MODEL,
                "litellm_params": {
                    "model": f"text-completion-openai/{MODEL}",
                    "api_base": f"http://127.0.0.1:{port}/v1",
                    "api_key": "none",
                    "weight": slots,
                },
            }
            for port, slots in words["targets"]
        ],
        routing_strategy=words["strategy"],
        num_retries=1,
    )

    async def ask(asked, heard, elapsed):
        body = asked.body()
        stream = await router.atext_completion(**body, extra_headers=asked.headers(), timeout=asked.budget_s)
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.text:
                    heard.tokens_at.append(elapsed())
                heard.whole = heard.whole or choice.finish_reason is not None

    return ask


if __name__ == "__main__":
    asyncio.run(serve(ask_of))
