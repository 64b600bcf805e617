"""The examples of the documentation run as they stand, against real gateways."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.gateway.text_gateway import text_gateway

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


async def run(name: str, *arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        str(EXAMPLES / name),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60.0):
        said, _ = await process.communicate()
    return process.returncode, said.decode()


async def test_the_examples_say_what_their_answers_say(tmp_path: Path) -> None:
    async with text_gateway(tmp_path) as (gateway, _):
        url = gateway.addresses["http"]
        code, said = await run("chat.py", url, "talker", "Tide?")
        assert code == 0, said
        assert "by edge/till (" in said
        assert "tokens by edge/till" in said
        code, said = await run("chat.py", url, "nothing", "Tide?")
        assert (code, said.partition(":")[0]) == (1, "model_not_found")
        code, said = await run("infer.py", url, "nothing", "image", "8", "8")
        assert (code, said) == (0, "{'model_not_found': 20}\n")
