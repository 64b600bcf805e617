"""The three budgets of a generation, from the SDK of OpenAI through a whole gateway to a device, and to `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.app import Gateway
from tests.support.gateway.text_gateway import text_gateway

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ASKED: Any = [{"role": "user", "content": "when does the tide come in?"}]


def sdk(gateway: Gateway, **options: Any) -> openai.AsyncOpenAI:
    url = f"{gateway.addresses['http']}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, **options)


async def streamed(client: openai.AsyncOpenAI, **headers: str) -> str:
    """The gateway's id of a request that was streamed to its end."""
    stream = await client.chat.completions.create(
        model="talker", messages=ASKED, max_tokens=24, stream=True, extra_headers=headers
    )
    last: Any = None
    async for chunk in stream:
        last = chunk
    found: str = last.model_extra["tidegate"]["tidegate-request-id"]
    return found


async def explained(gateway: Gateway, request_id: str) -> dict[str, Any]:
    url = f"{gateway.addresses['admin']}/debug/decisions?id={request_id}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        [found] = (await response.json())["decisions"]
    return dict(found)


async def test_budgets_are_kept_missed_counted_and_shown_and_end_nothing(tmp_path: Path) -> None:
    async with text_gateway(tmp_path, step_ms=20.0) as (gateway, _), sdk(gateway) as client:
        wide = await streamed(client, **{"tidegate-ttft-ms": "20000", "x-slo-tpot-ms": "5000"})
        tight = await streamed(client, **{"x-slo-ttft-ms": "20000", "tidegate-tpot-ms": "1"})
        patient = sdk(gateway, timeout=50.0)
        by_timeout = await streamed(patient)
        await patient.close()

        budgets = (await explained(gateway, wide))["budgets"]
        assert (budgets["first_ms"], budgets["next_ms"]) == (pytest.approx(20_000.0, abs=1.0), 5000.0)
        assert 0.0 < budgets["first_token_ms"] < 20_000.0
        assert budgets["each_token_ms"] > 10.0
        told = await explained(gateway, tight)
        assert told["outcome"] == "ok"  # 20 ms a token, and 1 ms asked: it is answered all the same
        assert told["budgets"]["each_token_ms"] > told["budgets"]["next_ms"] == 1.0
        chosen = next(one for one in told["candidates"] if one["target"] == told["chosen"])
        assert chosen["tokens"]["next"] < 0.1 < chosen["tokens"]["first"]
        silence = (await explained(gateway, by_timeout))["budgets"]  # the SDK's read timeout bounds silences
        assert (silence["first_ms"], silence["next_ms"]) == (pytest.approx(50_000.0, abs=1.0), 50_000.0)

        async with aiohttp.ClientSession() as session, session.get(gateway.addresses["metrics"] + "/metrics") as page:
            text = await page.text()
        assert 'tidegate_token_budgets_total{budget="all",model="talker",result="kept"} 2.0' in text
        assert 'tidegate_token_budgets_total{budget="next",model="talker",result="missed"} 1.0' in text


@pytest.mark.parametrize("header", ["tidegate-ttft-ms", "tidegate-tpot-ms", "x-slo-ttft-ms", "x-slo-tpot-ms"])
async def test_a_budget_that_is_none_is_refused_by_name(header: str, tmp_path: Path) -> None:
    async with text_gateway(tmp_path) as (gateway, _), sdk(gateway) as client:
        with pytest.raises(openai.BadRequestError, match=header):
            await streamed(client, **{header: "soon"})
