"""An answer that goes on at another edge while the first still speaks: real links, workers and clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.core.request.handover_by_chance import ChanceHandovers
from gateway.core.request.hedging import DeadlineHedging
from tests.e2e.generate.test_resumption import HELLO, TOKENS, sdk, undisturbed
from tests.gateway.serving.test_handover import Script
from tests.support.gateway.app import until
from tests.support.gateway.edge_pair import edge_pair
from tests.support.gateway.text_gateway import text_repository

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


async def test_openais_sdk_streams_over_a_handover_and_each_token_comes_once(tmp_path: Path) -> None:
    models = await asyncio.to_thread(text_repository, tmp_path, step_ms=25.0)
    async with edge_pair(tmp_path, models, planned_handover=True) as one, sdk(one) as client:
        assert isinstance(one.gateway.dispatcher.handovers, ChanceHandovers)
        whole = await undisturbed(one)
        assert "from=" not in str(whole.model_extra), "where all places are alike an answer stays"
        # A busy machine's late first token would be hedged: here the rule for handovers is to act alone.
        one.gateway.dispatcher.hedges = DeadlineHedging()
        one.gateway.dispatcher.handovers = Script(at=8, keeps_s=20.0, gives_up_s=20.0)
        stream = await client.chat.completions.create(
            model="talker",
            messages=HELLO,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        left = stream.response.headers["tidegate-served-by"]
        chunks = [chunk async for chunk in stream]

        said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(said) == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == "length"
        words = chunks[-2].model_extra["tidegate"]
        other = "edge/b" if left == "edge/a" else "edge/a"
        assert words["tidegate-served-by"] == other and words["tidegate-route"].startswith("planned;")
        assert words["tidegate-resumed"].startswith(f"from={left} to={other} at=")
        assert words["tidegate-resumed"].endswith("grade=exact reason=planned")
        record = next(reversed(one.gateway.dispatcher.recorder))
        assert record.reasons[1:] == ("planned",) and record.wasted_tokens > 0
        await until(lambda: one.busy == [])
        await until(lambda: one.gateway.admission.in_flight == 0)
