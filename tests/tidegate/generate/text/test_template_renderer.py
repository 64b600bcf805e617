"""Chat templates in their process: those of published models work, hostile ones are stopped and harm no one else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop import settle
from tests.support.models.text_side import TEMPLATE
from tests.support.serving.writing_host import until
from tidegate import clock
from tidegate.generate.text.template_renderer import TemplateRenderer
from tidegate.outcome import InvalidRequest

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hé 🌊"}], "add_generation_prompt": True}


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    one = TemplateRenderer(render_s=5.0, max_characters=100_000)
    yield one
    await one.aclose()


@pytest.mark.slow
async def test_a_conversation_is_rendered(renderer: TemplateRenderer) -> None:
    assert await renderer.render(TEMPLATE, HELLO) == "<|im_start|>user\nhé 🌊<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
@pytest.mark.parametrize(("template", "text"), [
    ("{{ tools | tojson }}", '["<a> é"]'),
    ("{% for one in tools %}{% if true %}{% break %}{% endif %}x{% endfor %}y", "y"),
    ("a{% generation %}b{% endgeneration %}c", "abc"),
    ("{% set n = namespace(x=1) %}{% for i in range(3) %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}", "4"),
    ("{{ strftime_now('%%') }}", "%"),
])  # fmt: skip
async def test_what_templates_of_published_models_use_is_there(
    renderer: TemplateRenderer, template: str, text: str
) -> None:
    assert await renderer.render(template, {"tools": ["<a> é"]}) == text


@pytest.mark.slow
@pytest.mark.parametrize(("template", "words"), [
    ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ '%s' | attr('__class__') }}{{ ('' | attr('__class__')).__mro__ }}", "unsafe"),
    ("{% include '/etc/passwd' %}", "TypeError"),
    ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
    ("{% for i in range(90000) %}{{ messages }}{% endfor %}", "more than 100000 characters"),
    ("{{ 'x' * 10 ** 12 }}", "more than 1024 MiB"),
    ("{% if", "TemplateSyntaxError"),
    ("{{ messages[7].content.x.y }}", "UndefinedError"),
])  # fmt: skip
async def test_a_template_that_breaks_out_or_asks_for_too_much_is_refused(
    renderer: TemplateRenderer, template: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as refused:
        await renderer.render(template, HELLO)
    assert words in refused.value.message
    assert await renderer.render("fine", {}) == "fine"


@pytest.mark.slow
@pytest.mark.parametrize("template", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
])  # fmt: skip
async def test_one_that_does_not_end_is_killed_and_the_next_text_is_rendered(template: str) -> None:
    renderer = TemplateRenderer(render_s=0.5)
    before = len(os.listdir("/proc/self/fd"))
    try:
        await renderer.start()
        killed = int(repr(renderer).rstrip(">").split()[-1])
        with pytest.raises(InvalidRequest, match=r"more than 0\.5 s|too much memory|more than 1024 MiB"):
            await renderer.render(template, HELLO)
        assert await renderer.render("fine", {}) == "fine"
        with pytest.raises(ProcessLookupError):
            os.kill(killed, 0)
    finally:
        await renderer.aclose()
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)


@pytest.mark.slow
async def test_a_caller_that_leaves_while_the_process_starts_leaves_none(renderer: TemplateRenderer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for turns in (1, 3, 8):
        leaving = asyncio.create_task(renderer.start())
        await settle(turns)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled() and repr(renderer) == "<TemplateRenderer not started>"
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)
    assert await renderer.render("mine", {}) == "mine"


@pytest.mark.slow
async def test_a_caller_that_leaves_disturbs_no_other(renderer: TemplateRenderer) -> None:
    slow = "{% for i in range(3000) %}{% for j in range(100) %}{% endfor %}{% endfor %}slow"
    await renderer.start()
    leaving = asyncio.create_task(renderer.render(slow, {}))
    await settle()
    leaving.cancel()
    assert await renderer.render("mine", {}) == "mine"
    assert await asyncio.gather(leaving, return_exceptions=True) != ["slow"]


@pytest.mark.slow
async def test_what_a_caller_leaves_behind_takes_none_of_the_next_ones_time() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    renderer = TemplateRenderer(render_s=0.5)
    try:
        await renderer.start()
        for leave_s in (0.05, 0.4):
            leaving = asyncio.create_task(renderer.render(endless, {}))
            waiting = asyncio.create_task(renderer.render("never", {}))
            await clock.sleep(leave_s)
            leaving.cancel()
            await clock.sleep(0.05)
            waiting.cancel()  # it leaves too, while it waits for what was left
            assert await renderer.render("mine", {}) == "mine"
            assert waiting.cancelled()
    finally:
        await renderer.aclose()


@pytest.mark.slow
async def test_a_process_that_ends_over_what_a_caller_left_behind_is_started_again(renderer: TemplateRenderer) -> None:
    await renderer.start()
    leaving = asyncio.create_task(renderer.render("{% for i in range(90000) %}{{ i }}{% endfor %}" * 50, {}))
    await settle()
    leaving.cancel()
    await settle()
    os.kill(int(repr(renderer).rstrip(">").split()[-1]), signal.SIGKILL)
    assert await renderer.render("mine", {}) == "mine"


@pytest.mark.slow
async def test_texts_at_once_do_not_get_each_others(renderer: TemplateRenderer) -> None:
    found = await asyncio.gather(*(renderer.render("{{ x }}", {"x": index}) for index in range(50)))
    assert found == [str(index) for index in range(50)]


@pytest.mark.slow
async def test_the_process_has_no_secrets_and_ends_with_its_owner(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_SECRET", "hidden")
    await renderer.start()
    process = int(repr(renderer).rstrip(">").split()[-1])
    environment = await asyncio.to_thread(Path(f"/proc/{process}/environ").read_bytes)
    assert b"hidden" not in environment
    await renderer.aclose()
    await until(lambda: not Path(f"/proc/{process}").exists())
