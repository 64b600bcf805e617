"""A generating model with a real text side: a byte-level tokenizer of a few hundred tokens, and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.models.generative import GENERATIVE, TALKER
from tidegate.generate.vocabulary import vocabulary_digest
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Manifest

END = "<|im_end|>"
TEMPLATE = """\
{%- for message in messages %}
{%- if message.content is not string %}{{ raise_exception("content must be text") }}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tiny_tokenizer() -> Any:
    """Bytes and a few common words, so that a character of many bytes has many tokens."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the tide comes in and the tide goes out with the moon"] * 8, trainer)
    return tokenizer


def text_side_folder(path: Path, *, template: str | None = TEMPLATE, context: int = 512) -> Manifest:
    """Puts the text side into `path`; its manifest."""
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    generative = replace(
        GENERATIVE,
        context=context,
        vocabulary=vocabulary_digest(tokenizer),
        vocabulary_size=tokenizer.get_vocab_size(),
        tokenizer_sha256=sha256_of(path / "tokenizer.json"),
        stop_tokens=(tokenizer.token_to_id(END),),
        chat_template=None if template is None else "chat_template.jinja",
        chat_template_sha256=None if template is None else sha256_of(path / "chat_template.jinja"),
        default_max_tokens=min(64, context),
    )
    return replace(TALKER, generative=generative)
