"""Prompts for greedy answers: a few of our own, or a user's, as the model's token ids.

One prompt a line. A model with a chat template gets each as a user's message, any other as a text to go on with. Ours
are of many kinds, since what quantization breaks first differs: facts, code, numbers, other languages, long lists.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tidegate.generate.text.text_models import TextModel, TextModels
from tidegate.generate.text.text_side import PromptTooLong
from tidegate.models.manifest import Manifest
from tidegate.outcome import ServeError
from tidegate.runtime.process import StartError
from tidegate.tools.build.errors import BuildError

MAX_PROMPTS: Final = 256
_MAX_BYTES: Final = 1 << 20
PROMPTS: Final = (
    "What is the capital of France?",
    "Write one sentence about rivers.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that adds two numbers.",
    "Count from one to twenty in words.",
    "Translate into French: the train leaves at seven in the morning.",
    "Give three reasons to walk to work.",
    "A shop sells pens at 2 euros each. How much do 14 pens cost?",
)


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a file, without blank lines. Raises BuildError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        lines = content.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: cannot be read as lines of text: {error}") from error
    prompts = tuple(line for line in lines if line.strip())
    if len(content) > _MAX_BYTES or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise BuildError(f"{path}: has {len(prompts)} prompts; 1 to {MAX_PROMPTS} are wanted, one a line, in 1 MiB")
    return prompts


class _OneFolder:
    """The folder of a version that may still be under construction."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, manifest: Manifest) -> Path:
        return self._folder

    def __repr__(self) -> str:
        return f"<_OneFolder {self._folder}>"


@asynccontextmanager
async def text_side(folder: Path, manifest: Manifest) -> AsyncIterator[TextModel]:
    """The text side of the version in `folder`. Raises BuildError: the tokenizer or the template is of no use."""
    sides = TextModels(_OneFolder(folder))
    try:
        yield await sides.of(manifest)
    except (ServeError, StartError) as error:
        raise BuildError(str(error)) from error
    finally:
        await sides.aclose()


async def encoded_prompt(side: TextModel, prompt: str, *, room: int) -> tuple[int, ...]:
    """The ids of a prompt, in the model's template if it has one; () where they are more than `room`."""
    try:
        if side.chats:
            return await side.chat_prompt([{"role": "user", "content": prompt}], {}, room=room)
        return await side.encode(prompt, room=room)
    except PromptTooLong:
        return ()


async def prompt_ids(
    folder: Path, manifest: Manifest, prompts: Sequence[str], *, max_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The ids of those that leave room for an answer of `max_tokens`.

    Args:
        folder: where the version's tokenizer and template are.

    Raises:
        BuildError: none does, or the tokenizer cannot be read, or the template refuses a prompt.
    """
    assert manifest.generative is not None
    room = manifest.generative.context - max_tokens
    async with text_side(folder, manifest) as side:
        found = [ids for one in prompts if (ids := await encoded_prompt(side, one, room=room))]
    if not found:
        raise BuildError(f"no prompt leaves room for {max_tokens} tokens in a context of {manifest.generative.context}")
    return tuple(found)
