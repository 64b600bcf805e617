"""The text side of each generating model: its tokenizer, its chat template, and what both need to know of its tokens.

They are read from the model's folder once, and checked against the digests of its manifest; those of a version that was
shipped to devices, from where its files were put for that. A model whose files are nowhere, because it is known only
from what targets offer, is asked in token ids and answers in ids.

A short text takes some tens of microseconds, less than a thread's round trip, and is done in place; more goes to a
thread, where the tokenizers library lets go of Python's lock. Of a text far beyond the context only the beginning is
read: it is refused for having too many tokens, and at least how many is said.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
from tokenizers import Tokenizer, decoders

from tidegate.generate.text.detokenizer import Detokenizer
from tidegate.generate.text.template_renderer import TemplateRenderer
from tidegate.generate.text.text_side import check_room
from tidegate.generate.text.token_text import TokenText, TokenTexts
from tidegate.generate.text.tool_calls import Dialect, dialect_of
from tidegate.generate.vocabulary import vocabulary_digest
from tidegate.models.generative import Generative
from tidegate.models.manifest import Manifest
from tidegate.models.repository import RepositoryError, read_text_file
from tidegate.outcome import NotSupported
from tidegate.runtime.process import StartError

INLINE_CHARACTERS: Final = 2048
HEAD_CHARACTERS_PER_TOKEN: Final = 32  # English has 4 to 5
_CUT_TOKENS: Final = 256
_BROKEN: Final = "\ufffd"

log = structlog.get_logger(__name__)


class ModelFolders(Protocol):
    """The part of the model repository that is needed here."""

    def folder(self, manifest: Manifest) -> Path: ...


class TextModel:
    """A `TextSide` that may also chat.

    Args:
        template: the chat template; None: it only completes.
    """

    def __init__(self, manifest: Manifest, tokenizer: Any, template: str | None, renderer: TemplateRenderer) -> None:
        assert manifest.generative is not None
        self.generative: Generative = manifest.generative
        self._name = manifest.name
        self._tokenizer = tokenizer
        self._template = template
        self._renderer = renderer
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._token_texts = TokenTexts(tokenizer)
        self._fixed: dict[int, str | None] = {}  # by id, as far as they have been met
        begins = tokenizer.encode("").ids
        stops = self.generative.stop_tokens
        self._special = {
            "bos_token": tokenizer.id_to_token(begins[0]) if begins else "",
            "eos_token": (tokenizer.id_to_token(stops[0]) or "") if stops else "",
        }

    @property
    def chats(self) -> bool:
        return self._template is not None

    @property
    def takes_tools(self) -> bool:
        return self._template is not None and "tools" in self._template

    def takes(self, variable: str) -> bool:
        """Whether the chat template reads a variable of this name."""
        return self._template is not None and re.search(rf"\b{re.escape(variable)}\b", self._template) is not None

    @property
    def tool_dialect(self) -> Dialect | None:
        """How the model writes calls of tools; None where that is not known."""
        return dialect_of(self._template) if self._template is not None and self.takes_tools else None

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], *, room: int
    ) -> tuple[int, ...]:
        """The ids of a conversation, up to where the model's answer begins.

        Args:
            messages: each with a text as `content`.
            values: the template's others, such as `tools`.
            room: the most tokens that it may have.

        Raises:
            NotSupported: the model has no chat template.
            InvalidRequest: the template refuses the messages.
            PromptTooLong: names the number of tokens.
        """
        if self._template is None:
            raise NotSupported(f"model {self._name!r} has no chat template: it completes text, at /v1/completions")
        await self._check_size(messages, room)
        given = {"add_generation_prompt": True, **self._special, **values, "messages": messages}
        text = await self._renderer.render(self._template, given)
        return await self.encode(text, room=room, special=False)  # a template writes its special tokens itself

    async def encode(self, text: str, *, room: int, special: bool = True) -> tuple[int, ...]:
        """As in `TextSide`."""
        head = text[: HEAD_CHARACTERS_PER_TOKEN * (room + 1)]
        if len(head) <= INLINE_CHARACTERS:
            ids = self._tokenizer.encode(head, add_special_tokens=special).ids
        else:
            ids = (await asyncio.to_thread(self._encode_aside, head, special)).ids
        # The cut may have taken a token of many characters apart, such as spaces in a row: only far too many are proof.
        if len(head) < len(text) and len(ids) <= 2 * room + _CUT_TOKENS:
            ids = (await asyncio.to_thread(self._encode_aside, text, special)).ids
            head = text
        check_room(len(ids), room, at_least=len(head) < len(text))
        return tuple(ids)

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """What turns the answer to this prompt into text."""
        return Detokenizer(self, prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def fixed_text(self, id: int) -> str | None:
        """As in `Decoder`: of byte-level tokens that are whole characters."""
        try:
            return self._fixed[id]
        except KeyError:
            text = self.decode([id]) if self._is_byte_level else _BROKEN
            self._fixed[id] = None if _BROKEN in text else text
            return self._fixed[id]

    def token_text(self, id: int) -> TokenText:
        """One token by itself, special ones included."""
        return self._token_texts.of(id)

    async def _check_size(self, messages: Sequence[Mapping[str, Any]], room: int) -> None:
        """Refuse messages that are too long by themselves: rendering them would hold up the others'."""
        if sum([len(one["content"]) for one in messages]) > HEAD_CHARACTERS_PER_TOKEN * (room + 1):
            await self.encode("".join([one["content"] for one in messages]), room=room, special=False)

    def _encode_aside(self, text: str, special: bool) -> Any:
        return self._tokenizer.encode_batch([text], add_special_tokens=special)[0]

    def __repr__(self) -> str:
        return f"<TextModel {self._name}{' with chat' if self.chats else ''}>"


class TextModels:
    """The `TextSides` of a repository's models. `aclose` ends the process that renders their templates.

    Versions with the same text side share it.

    Args:
        by_digest: where a file that the repository lacks may be, by its SHA-256: of a version that was shipped; None:
            nowhere.
    """

    def __init__(self, repository: ModelFolders, by_digest: Callable[[str], Path] | None = None) -> None:
        self._repository = repository
        self._by_digest = by_digest
        self._renderer = TemplateRenderer()
        self._loaded: dict[tuple[str, Generative | None], TextModel] = {}
        self._loading = asyncio.Lock()

    async def load(self, manifests: Sequence[Manifest]) -> None:
        """Read those of generating models.

        Raises:
            StartError: a tokenizer or a template is another than the manifest names, or cannot be read.
        """
        for manifest in manifests:
            if manifest.generative is not None and not manifest.generative.is_text_only:
                try:
                    await self.of(manifest)
                except NotSupported as error:
                    log.warning("a model generates ids only", model=manifest.name, reason=error.message)

    async def start_rendering(self) -> None:
        """Start the process for templates now, if a model that was read has one: else its first caller waits for it."""
        if any(model.chats for model in self._loaded.values()):
            await self._renderer.start()

    async def of(self, manifest: Manifest) -> TextModel:
        """The text side of a generating model. Raises NotSupported where its folder has none."""
        key = (manifest.name, manifest.generative)
        if (found := self._loaded.get(key)) is not None:
            return found
        async with self._loading:
            if key not in self._loaded:
                folder = self._repository.folder(manifest)
                self._loaded[key] = await asyncio.to_thread(self._read, manifest, folder)
            return self._loaded[key]

    def _read(self, manifest: Manifest, folder: Path) -> TextModel:
        generative = manifest.generative
        assert generative is not None
        path = self._place(folder / generative.tokenizer, generative.tokenizer_sha256)
        if not path.is_file():
            raise NotSupported(
                f"the tokenizer of model {manifest.name!r} is not here, so it takes and gives token ids only: "
                f"send input_ids to /v2/models/{manifest.name}/infer"
            )
        template = None
        try:
            content = read_text_file(path, "the tokenizer", generative.tokenizer_sha256)
            if generative.chat_template is not None and _can_render(manifest):
                at = self._place(folder / generative.chat_template, generative.chat_template_sha256)
                template = read_text_file(at, "the template", generative.chat_template_sha256).decode()
            tokenizer: Any = Tokenizer.from_buffer(content)
        except (RepositoryError, UnicodeDecodeError) as error:
            raise StartError(f"cannot read the text side of {manifest.name!r}: {error}") from error
        except Exception as error:  # the library raises nothing narrower
            raise StartError(f"cannot read the tokenizer {path}: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if (digest := vocabulary_digest(tokenizer)) != generative.vocabulary:
            raise StartError(
                f"{path}: its vocabulary has the digest {digest}, but the manifest names {generative.vocabulary}"
            )
        return TextModel(manifest, tokenizer, template, self._renderer)

    def _place(self, path: Path, sha256: str | None) -> Path:
        if self._by_digest is None or sha256 is None or path.is_file():
            return path
        found = self._by_digest(sha256)
        return found if found.is_file() else path

    async def aclose(self) -> None:
        await self._renderer.aclose()

    def __repr__(self) -> str:
        return f"<TextModels {len(self._loaded)} loaded, {self._renderer!r}>"


def _can_render(manifest: Manifest) -> bool:
    """Whether Jinja is installed: a device may do without."""
    found = find_spec("jinja2") is not None
    if not found:
        log.info("a model completes text and does not chat", model=manifest.name, way_out="pip install jinja2")
    return found
