"""The text side of a model, from its folder: what is checked, what is missing, and what a prompt may be."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.models.text_side import TEMPLATE, text_side_folder, tiny_tokenizer
from tests.support.serving.oip_servers import OneFolder
from tidegate.generate.text import text_models
from tidegate.generate.text.text_models import TextModels
from tidegate.generate.text.text_side import PromptTooLong
from tidegate.generate.vocabulary import vocabulary_digest
from tidegate.models.alike import differences
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Manifest
from tidegate.outcome import NotSupported
from tidegate.runtime.process import StartError


def changed(manifest: Manifest, **values: object) -> Manifest:
    assert manifest.generative is not None
    return replace(manifest, generative=replace(manifest.generative, **values))


async def test_a_text_becomes_its_tokens_and_too_many_are_counted(tmp_path: Path) -> None:
    model = await TextModels(OneFolder(tmp_path)).of(text_side_folder(tmp_path))
    ids = tiny_tokenizer().encode("the tide " * 400).ids
    assert await model.encode("the tide", room=10) == tuple(tiny_tokenizer().encode("the tide").ids)
    assert await model.encode("the tide " * 400, room=len(ids)) == tuple(ids)  # aside, since it is long
    with pytest.raises(PromptTooLong, match=f"has {len(ids)} tokens; at most 200 may"):
        await model.encode("the tide " * 400, room=200)
    with pytest.raises(PromptTooLong, match=r"has at least \d+ tokens; at most 10 may"):
        await model.encode("🌊" * 400, room=10)


async def test_messages_that_are_too_long_are_refused_before_they_are_rendered(tmp_path: Path) -> None:
    texts = TextModels(OneFolder(tmp_path))
    model = await texts.of(text_side_folder(tmp_path))
    messages = [{"role": "user", "content": "🌊" * 1000}] * 3
    with pytest.raises(PromptTooLong, match="at least"):
        await model.chat_prompt(messages, {}, room=50)
    assert "not started" in repr(texts)


async def test_tokens_of_very_many_characters_are_not_too_many(tmp_path: Path) -> None:
    manifest = text_side_folder(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(["=" * 200])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    manifest = changed(
        manifest, tokenizer_sha256=sha256_of(tmp_path / "tokenizer.json"), vocabulary=vocabulary_digest(tokenizer)
    )
    model = await TextModels(OneFolder(tmp_path)).of(manifest)
    assert len(await model.encode("=" * 200 * 5, room=6)) == 5


async def test_a_folder_without_the_tokenizer_is_no_error_at_the_start(tmp_path: Path) -> None:
    manifest = text_side_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    texts = TextModels(OneFolder(tmp_path))
    await texts.load([manifest])
    with pytest.raises(NotSupported, match="it takes and gives token ids only"):
        await texts.of(manifest)


@pytest.mark.parametrize(("key", "words"), [
    ("tokenizer_sha256", "the manifest names 0000"),
    ("chat_template_sha256", "the manifest names 0000"),
    ("vocabulary", "its vocabulary has the digest"),
])  # fmt: skip
async def test_another_file_than_the_manifest_names_ends_the_start(tmp_path: Path, key: str, words: str) -> None:
    manifest = changed(text_side_folder(tmp_path), **{key: "0" * 64})
    with pytest.raises(StartError, match=words):
        await TextModels(OneFolder(tmp_path)).load([manifest])


@pytest.mark.parametrize("content", [b"{}", b"\x00\x01", b"[1, 2"])
async def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    manifest = text_side_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    manifest = changed(manifest, tokenizer_sha256=sha256_of(tmp_path / "tokenizer.json"))
    with pytest.raises(StartError, match=r"cannot read the tokenizer .*tokenizer\.json"):
        await TextModels(OneFolder(tmp_path)).load([manifest])


async def test_without_jinja_a_model_completes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_models, "find_spec", lambda name: None)
    model = await TextModels(OneFolder(tmp_path)).of(text_side_folder(tmp_path))
    assert (model.chats, model.takes_tools) == (False, False)


@pytest.mark.slow
async def test_the_special_tokens_of_a_template_are_the_models(tmp_path: Path) -> None:
    texts = TextModels(OneFolder(tmp_path))
    try:
        template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
        model = await texts.of(text_side_folder(tmp_path, template=template))
        ids = await model.chat_prompt([{"role": "user", "content": "a"}], {}, room=50)
        assert tiny_tokenizer().decode(list(ids), skip_special_tokens=False) == "a<|im_end|>"
    finally:
        await texts.aclose()


def test_versions_with_other_vocabularies_do_not_stand_in_for_one_another(tmp_path: Path) -> None:
    one = text_side_folder(tmp_path, template=TEMPLATE)
    assert differences(one, replace(one, version="2")) == ()
    assert differences(one, changed(one, vocabulary="1" * 64)) == ("generative",)


async def test_the_files_of_a_version_that_was_shipped_are_found_by_their_digests(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    manifest = text_side_folder(tmp_path / "made")
    assert manifest.generative is not None and manifest.generative.chat_template_sha256 is not None
    texts = TextModels(OneFolder(tmp_path / "nowhere"), tmp_path.joinpath)
    with pytest.raises(NotSupported, match="the tokenizer of model 'talker' is not here"):
        await texts.of(manifest)
    for name, digest in (
        ("tokenizer.json", manifest.generative.tokenizer_sha256),
        ("chat_template.jinja", manifest.generative.chat_template_sha256),
    ):
        (tmp_path / digest).write_bytes((tmp_path / "made" / name).read_bytes())
    found = await texts.of(manifest)
    assert found.chats and await found.encode("the tide", room=10)
    assert await texts.of(replace(manifest, version="2")) is found, "the same text side is not read twice"
