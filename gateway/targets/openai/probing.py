"""What a server is and can do, found out by asking it, whenever it is found anew.

    GET  /v1/models           who it is (`owned_by`), and whether it has the models that are configured
    GET  /props               llama-server: slots, and the context of each
    GET  /api/version         Ollama, which does not say so elsewhere
    POST /tokenize            the ids of a sample, held against those of the model's tokenizer here
    a few greedy tokens       by ids, held against the text that the server gives with them
    POST /apply-template      whether it goes on behind a last message of the assistant; vLLM: /tokenize and /detokenize

The grade is what all this allows. Ids travel only where both comparisons hold: ids of another vocabulary are an answer
in another language. That needs the model's tokenizer, so a model that is not in the gateway's repository is asked in
text. A service that is none of the known kinds is asked for its list and nothing else: probing it may cost money, and
would prove little.

Source: the servers' own documentation, named in each dialect; Ollama's, "API".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from gateway.targets.openai.dialect import Dialect, count_in, ids_in, object_in
from gateway.targets.openai.llama_server import LlamaServerDialect
from gateway.targets.openai.progress import AnswerProgress
from gateway.targets.openai.sglang import SglangDialect
from gateway.targets.openai.text_dialect import CONTINUE, TextDialect
from gateway.targets.openai.upstream_client import Answered, UpstreamClient
from gateway.targets.openai.upstream_errors import refused_key
from gateway.targets.openai.upstream_model import UpstreamModel
from gateway.targets.openai.vllm import VllmDialect
from tidegate.fleet.offers import Grade
from tidegate.generate.request import GenerateRequest, ids_of, infer_request
from tidegate.generate.text.text_side import TextSide
from tidegate.models.manifest import Manifest
from tidegate.outcome import BadAnswer, ServeError, Unreachable
from tidegate.text_prompt import MESSAGES

LOOK_S: Final = 5.0  # for an answer that takes no computing
_SAMPLE_S: Final = 30.0  # for a few tokens of a server that may be busy
_SAMPLE: Final = "The tide comes in at 06:40.\n\tdef f(x): return x**2  # naïve café, 潮汐 🌊"
_SAMPLE_TOKENS: Final = 8
_BEGUN: Final = "Low water is at"
_USUAL_SLOTS: Final = 64
_MOST_LISTED: Final = 4096
_OWNERS: Final[Mapping[str, str]] = {
    "llamacpp": "llama-server", "vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm-serve",
}  # fmt: skip
_BY_IDS: Final[Mapping[str, Dialect]] = {
    "llama-server": LlamaServerDialect(), "vllm": VllmDialect(), "sglang": SglangDialect(),
}  # fmt: skip

TextOf = Callable[[Manifest], Awaitable[TextSide]]


class Listed(NamedTuple):
    """What the list of models says."""

    kind: str
    models: Mapping[str, Mapping[str, Any]]  # by id; {} where the server has no list


class ProbeLimits(NamedTuple):
    """What the operator has said of a server."""

    grade: Grade | None = None  # the most that is used
    slots: int | None = None
    context: int | None = None


async def listed(client: UpstreamClient, target: str) -> Listed:
    """Who the server is and which models it has. Raises ServeError: it cannot be used now."""
    answer = await client.ask("/models", within_s=LOOK_S)
    if answer.status in (401, 403):
        raise refused_key(target, answer.status)
    if answer.status in (404, 405):
        return Listed("openai-compatible", {})
    if answer.status != 200:
        raise Unreachable(f"{target} answers {answer.status} where its models should be: is its address right?")
    entries = object_in(answer.said).get("data")
    if not isinstance(entries, list) or len(entries) > _MOST_LISTED:
        raise BadAnswer(f"{target} does not list its models: is its address right?")
    models = {entry["id"]: entry for entry in map(object_in, entries) if isinstance(entry.get("id"), str)}
    for entry in list(models.values()):
        aliases = entry.get("aliases")
        models |= {one: entry for one in (aliases if isinstance(aliases, list) else ()) if isinstance(one, str)}
    return Listed(await _kind(client, answer, models), models)


async def _kind(client: UpstreamClient, answer: Answered, models: Mapping[str, Mapping[str, Any]]) -> str:
    for entry in models.values():
        owner = entry.get("owned_by")
        if isinstance(owner, str) and owner in _OWNERS:
            return _OWNERS[owner]
    if "openai-version" in answer.headers:
        return "openai"
    if any(":" in name for name in models):  # Ollama's names have a tag
        version = await client.ask("/api/version", from_root=True, within_s=LOOK_S)
        if version.status == 200 and isinstance(object_in(version.said).get("version"), str):
            return "ollama"
    return "openai-compatible"


class UpstreamProbe:
    """Probes the models of one server.

    Args:
        text_of: the text side of a model of the repository; raises NotSupported for one that has none here.
    """

    def __init__(self, client: UpstreamClient, found: Listed, limits: ProbeLimits, text_of: TextOf) -> None:
        self._client = client
        self._found = found
        self._limits = limits
        self._text_of = text_of

    async def model(self, name: str, name_there: str, manifest: Manifest | None) -> UpstreamModel:
        """What can be asked of a model. Raises ServeError: it is not there, or the server cannot be used now."""
        kind = self._found.kind
        entry = self._entry(name_there)
        slots, context = await self._size(entry)
        grade: Grade = "text"
        text, words = None, "the model is not in this gateway's repository, so its tokens are not known here"
        if manifest is not None:
            text, words = await self._by_ids(name_there, manifest)
            grade = "text" if text is None else "ids"
        if grade == "text" and await self._continues(name_there):
            grade = "prefill"
        grade, words = self._limited(grade, words)
        return UpstreamModel(
            name=name,
            name_there=name_there,
            kind=kind,
            grade=grade,
            why=words,
            dialect=_BY_IDS[kind] if grade == "ids" else self._text_dialect(),
            manifest=manifest,
            text=text if grade == "ids" else None,
            context=context,
            slots=slots,
        )

    def _limited(self, grade: Grade, words: str) -> tuple[Grade, str]:
        most = self._limits.grade
        if most is None or most == grade:
            return grade, words
        if grade == "ids" or most == "text":
            return most, "no more is allowed by openai.grade"
        if most == "prefill":
            return most, "said by openai.grade; " + words
        return grade, words

    def _entry(self, name_there: str) -> Mapping[str, Any]:
        models = self._found.models
        entry = models.get(name_there) or models.get(f"{name_there}:latest")
        if entry is None and self._found.kind == "llama-server" and len(models) > 0:
            entry = next(iter(models.values()))  # it has one model, and takes any name for it
        if entry is None and models:
            some = ", ".join(list(models)[:8])
            raise BadAnswer(f"it has no model {name_there[:100]!r} (openai.models); it lists {some[:300]}")
        return entry or {}

    async def _size(self, entry: Mapping[str, Any]) -> tuple[int, int | None]:
        """How many answers at a time, and the tokens of a context."""
        slots, context = None, count_in(entry.get("max_model_len"))
        if self._found.kind == "llama-server":
            props = object_in((await self._client.ask("/props", from_root=True, within_s=LOOK_S)).said)
            slots = count_in(props.get("total_slots"))
            context = count_in(object_in(props.get("default_generation_settings")).get("n_ctx"))
        return self._limits.slots or slots or _USUAL_SLOTS, self._limits.context or context or None

    # token ids

    async def _by_ids(self, name_there: str, manifest: Manifest) -> tuple[TextSide | None, str]:
        """The model's tokenizer if ids may travel, and what was compared, or why they may not."""
        kind = self._found.kind
        if manifest.generative is None:
            raise BadAnswer(f"model {manifest.name!r} of this gateway's repository generates no text")
        if kind not in _BY_IDS:
            return None, "no way for token ids is known of it"
        try:
            text = await self._text_of(manifest)
            ids = await text.encode(_SAMPLE, room=1024, special=False)
            if (theirs := await self._tokenized(name_there)) is not None and theirs != ids:
                return None, "its tokenizer gives other ids than the model's own for the same text"
            return await self._sampled(name_there, manifest, text)
        except Unreachable:
            raise
        except ServeError as error:
            return None, f"no token ids: {error.message}"

    async def _tokenized(self, name_there: str) -> tuple[int, ...] | None:
        """The server's ids of the sample; None where it does not say."""
        body: dict[str, Any] = {"model": name_there, "prompt": _SAMPLE, "add_special_tokens": False}
        if self._found.kind == "llama-server":
            body = {"content": _SAMPLE, "add_special": False}
        answer = await self._client.ask("/tokenize", body, from_root=True, within_s=LOOK_S)
        return ids_in(object_in(answer.said).get("tokens")) if answer.status == 200 else None

    async def _sampled(self, name_there: str, manifest: Manifest, text: TextSide) -> tuple[TextSide | None, str]:
        """A few tokens by ids, whose text here has to be that of the server, where it gives any."""
        prompt = await text.encode("The tide", room=1024)
        request = infer_request(manifest.name, GenerateRequest(prompt, _SAMPLE_TOKENS))
        dialect = _BY_IDS[self._found.kind]
        progress = AnswerProgress(request, None, text=text, stops=text.generative.stop_tokens)
        said = []
        reader = dialect.reader(request)
        try:
            async with self._client.stream(dialect.question(request, name_there)) as events:
                async for event in events:
                    part = reader.part(event)
                    said.append(part.text)
                    await progress.take(part)
        except ServeError as error:
            if isinstance(error, Unreachable):
                raise
            return None, f"it was sent token ids and refused them: {error.message}"
        if progress.finish is None:
            return None, "it was sent token ids and did not end its answer"
        [output] = progress.reply("", 0.0).response.outputs
        ids = ids_of(output)
        theirs = "".join(said)
        if not ids:
            return None, "it was sent token ids and gave none"
        detokenizer = text.detokenizer(prompt)
        ours = "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush()
        if theirs and ours.strip().rstrip("\ufffd") != theirs.strip().rstrip("\ufffd"):
            return None, "its token ids mean other text than the model's own"
        return text, "token ids both ways; they mean the same there and here"

    # text

    def _text_dialect(self) -> TextDialect:
        kind = self._found.kind
        resuming = {} if kind == "llama-server" else CONTINUE
        return TextDialect("max_completion_tokens" if kind == "openai" else "max_tokens", resuming)

    async def _continues(self, name_there: str) -> bool:
        """Whether it goes on behind a last message of the assistant, as far as it can be told without generating."""
        messages = [{"role": "user", "content": "When is the tide low?"}, {"role": "assistant", "content": _BEGUN}]
        if self._found.kind == "llama-server":
            answer = await self._client.ask("/apply-template", {MESSAGES: messages}, from_root=True, within_s=LOOK_S)
            return self._ends_so(answer)
        if self._found.kind == "vllm":
            body = {"model": name_there, MESSAGES: messages, **CONTINUE}
            answer = await self._client.ask("/tokenize", body, from_root=True, within_s=LOOK_S)
            if answer.status != 200:
                return False
            tokens = ids_in(object_in(answer.said).get("tokens"))
            body = {"model": name_there, "tokens": tokens}
            return self._ends_so(await self._client.ask("/detokenize", body, from_root=True, within_s=LOOK_S))
        return False

    @staticmethod
    def _ends_so(answer: Answered) -> bool:
        prompt = object_in(answer.said).get("prompt")
        return answer.status == 200 and isinstance(prompt, str) and prompt.endswith(_BEGUN)

    def __repr__(self) -> str:
        return f"<UpstreamProbe of {self._found.kind}, {len(self._found.models)} models>"
