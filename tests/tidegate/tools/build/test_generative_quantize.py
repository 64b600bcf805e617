"""A generating model's variant for edges is made from its weights, compared with them, recorded, and checked again."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.support.models.text_side import text_side_folder
from tests.support.models.tiny_models import tiny_repository
from tests.support.paced_generation import write_pace
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, load_manifest, save_manifest
from tidegate.rollout.golden_prompts import GoldenPrompts, decode_prompts, encode_prompts
from tidegate.tools.build import generative_build
from tidegate.tools.build.cli import model
from tidegate.tools.build.evaluate import greedy


def run(*words: Any) -> tuple[int, str]:
    result = CliRunner().invoke(model, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.output


def paced_talker(root: Path, **pace: Any) -> Path:
    """A repository with a paced model that has a real text side: its folder."""
    folder = root / "talker" / "1"
    folder.mkdir(parents=True)
    manifest = text_side_folder(folder)
    path = write_pace(folder, **{"ids": (5, 250), "context": 512, **pace})
    (variant,) = manifest.variants
    variant = replace(variant, artefact=path.name, sha256=sha256_of(path), size_bytes=path.stat().st_size)
    save_manifest(folder, replace(manifest, variants=(variant,)))
    return folder


@pytest.fixture(scope="module")
def pool_only(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the weights of the tiny Llama, for pools alone. Read it, never write to it."""
    root = tmp_path_factory.mktemp("weights") / "models"
    code, output = run("add", "t", "--generative", tiny_llama, "--only", "pool", "--repository", root)
    assert code == 0, output
    return root


def copied(source: Path, root: Path) -> Path:
    target = root / "t" / "1"
    target.mkdir(parents=True)
    for path in (source / "t" / "1").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.slow
def test_a_variant_is_made_compared_recorded_and_found_again(pool_only: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai", reason="the extra edge-llm is not installed")
    root = tmp_path / "models"
    folder = copied(pool_only, root)
    code, output = run("quantize", "t", "--agreement-min", "0", "--repository", root)
    assert code == 0 and "t: int4 is in " in output and "greedy tokens equal to those of bf16" in output, output
    manifest = load_manifest(folder)
    bf16, int4 = manifest.variants
    assert (int4.name, int4.engine, int4.where) == ("int4", "onnxruntime-genai", ("edge",))
    assert bf16.quality is not None and bf16.quality.value == 1.0
    assert int4.quality is not None and 0.0 < int4.quality.value < 1.0 and "perplexity" in int4.quality.how
    assert "tokenizer_config.json" in {one.name for one in int4.files}
    assert int4.golden is not None and (folder / int4.golden.name).is_file()

    code, output = run("quantize", "t", "--repository", root)
    assert code == 1 and "has a variant for edges, int4, already; --as-version NEW" in output
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = ("--precision", "int8", "--as-version", "2", "--agreement-min", "0.5")
    code, output = run("quantize", "t", *words, "--repository", root)
    assert code == 0, output
    _, int8 = load_manifest(root / "t" / "2").variants
    assert int8.quality is not None and int8.quality.value > int4.quality.value
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert run("verify", "t", "--repository", root)[1].count(" answers as recorded: ") == 2


@pytest.mark.slow
def test_a_variant_that_agrees_too_little_changes_nothing(pool_only: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai", reason="the extra edge-llm is not installed")
    root = tmp_path / "models"
    folder = copied(pool_only, root)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, output = run("quantize", "t", "--agreement-min", "1", "--repository", root)
    assert code == 1 and "int4 agrees with bf16 at 0." in output and "nothing was changed" in output, output
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [one.name for one in (root / "t").iterdir() if one.name != ".lock"] == ["1"]


def test_what_cannot_be_quantized_is_a_line(pool_only: Path, tmp_path: Path) -> None:
    paced_talker(tmp_path / "paced")
    tiny_repository(tmp_path / "tiny")
    for root, words, message in (
        (tmp_path / "paced", ("talker",), "has no variant with the model's own weights"),
        (tmp_path / "tiny", ("double",), "double:1 does not generate: give files"),
        (pool_only, ("nope",), "there is no model 'nope'"),
        (pool_only, ("t", "--as-version", "1"), "exists; give another --as-version"),
        (pool_only, ("t", "--as-version", ".."), "'..' must be"),
        (pool_only, ("t", "--prompts", tmp_path / "none.txt"), "none.txt: cannot be read as lines of text"),
        (pool_only, ("t.onnx",), "OUT.onnx is missing"),
        (pool_only, ("t", "--static"), "are of files"),
    ):
        code, output = run("quantize", *words, "--repository", root)
        assert code == 1 and message in output, output


def test_what_is_missing_here_is_said_before_anything_is_computed(
    pool_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(pool_only, tmp_path / "models")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(generative_build.importlib.util, "find_spec", lambda name: None if "genai" in name else object())
        code, output = run("quantize", "t", "--repository", tmp_path / "models")
        assert code == 1 and "needs onnxruntime_genai: pip install 'tidegate[build,edge-llm]'" in output
    monkeypatch.setattr(generative_build, "check_genai_packages", lambda what: None)
    monkeypatch.setattr("tidegate.tools.build.generative_quantize.check_genai_packages", lambda what: None)
    with monkeypatch.context() as patch:
        patch.setattr(generative_build.shutil, "disk_usage", lambda folder: usage(9, 9, 0))
        code, output = run("quantize", "t", "--repository", tmp_path / "models")
        assert code == 1 and "converting to int4 writes " in output and " has 0 MB free" in output
    monkeypatch.setattr(generative_build, "free_bytes", lambda: (5e8, 1e9))
    code, output = run("quantize", "t", "--repository", tmp_path / "models")
    assert code == 1 and "to int4 takes about 601 MB of memory, and 500 MB are free here" in output, output


@pytest.mark.slow
def test_recorded_answers_are_found_again_and_a_model_that_says_others_is_told_with_numbers(tmp_path: Path) -> None:
    folder = paced_talker(tmp_path)
    code, output = run("verify", "talker", "--repository", tmp_path)
    assert (
        code == 0 and "paced: no golden answers are recorded; `tidegate model golden talker --variant paced`" in output
    )
    code, output = run("golden", "talker", "--max-tokens", "8", "--repository", tmp_path)
    assert code == 0 and f"recorded 8 golden answers of paced in {folder}" in output, output
    code, output = run("verify", "talker", "--repository", tmp_path)
    assert code == 0 and "paced answers as recorded: 64 of 64 tokens (1.0000), 8 of 8 answers" in output, output

    manifest = load_manifest(folder)
    (variant,) = manifest.variants
    assert variant.golden is not None and variant.quality is None
    changed = _with_other_answers(folder, manifest, count=1)
    save_manifest(folder, changed)
    code, output = run("verify", "talker", "--agreement-min", "0.9", "--repository", tmp_path)
    # Every token of one answer of eight is another one.
    assert code == 1 and "WRONG paced answers as recorded: 56 of 64 tokens (0.8750), 7 of 8" in output, output
    assert run("verify", "talker", "--agreement-min", "0.8", "--repository", tmp_path)[0] == 0
    assert run("verify", "talker", "--digests-only", "--repository", tmp_path)[0] == 0
    (folder / variant.golden.name).write_bytes(b"cut")
    code, output = run("verify", "talker", "--digests-only", "--repository", tmp_path)
    assert code == 1 and "golden-paced.msgpack: has sha256" in output, output


def _with_other_answers(folder: Path, manifest: Manifest, *, count: int) -> Manifest:
    """The manifest with a golden file of which `count` answers are wrong in every token."""
    (variant,) = manifest.variants
    assert variant.golden is not None and manifest.generative is not None
    path = folder / variant.golden.name
    prompts = decode_prompts(path.read_bytes(), manifest.generative)
    wrong = [replace(one, ids=tuple((id + 1) % 300 for id in one.ids)) for one in prompts.answers[:count]]
    path.write_bytes(encode_prompts(replace(prompts, answers=(*wrong, *prompts.answers[count:]))))
    golden = replace(variant.golden, sha256=sha256_of(path), size_bytes=path.stat().st_size)
    return replace(manifest, variants=(replace(variant, golden=golden),))


@pytest.mark.slow
def test_prompts_of_a_users_own_are_recorded_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = paced_talker(tmp_path / "models")
    prompts = tmp_path / "mine.txt"
    prompts.write_text("the tide comes in\n\n" + "?" * 2000 + "\nthe tide goes out\n")
    out = tmp_path / "golden.msgpack"
    words = ("golden", "talker", "--prompts", prompts, "--out", out, "--repository", tmp_path / "models")
    code, output = run(*words, "--max-tokens", "5")
    assert code == 0 and f"recorded 2 golden answers of paced in {out}; 1 prompt leaves no room" in output, output
    manifest = load_manifest(folder)
    assert manifest.variants[0].golden is None and manifest.generative is not None
    found: GoldenPrompts = decode_prompts(out.read_bytes(), manifest.generative)
    assert [len(one.ids) for one in found.answers] == [5, 5], "the prompt without room for an answer is left out"
    assert found.made_by == "paced"
    prompts.write_text("?" * 2000)
    code, output = run(*words)
    assert code == 1 and "no prompt leaves room for 24 tokens in a context of 512" in output
    prompts.write_text("\n")
    code, output = run(*words)
    assert code == 1 and "has 0 prompts; 1 to 256 are wanted" in output


def test_golden_answers_are_of_variants_that_generate(tmp_path: Path) -> None:
    paced_talker(tmp_path / "models")
    tiny_repository(tmp_path / "tiny")
    for root, words, message in (
        (tmp_path / "tiny", ("double",), "double:1 does not generate: its golden cases are an .npz"),
        (tmp_path / "models", ("talker", "--variant", "int4"), "talker:1 has no variant 'int4': paced"),
    ):
        code, output = run("golden", *words, "--repository", root)
        assert code == 1 and message in output, output


def test_a_variant_whose_runtime_is_not_here_is_not_run_and_is_no_problem(
    pool_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy, "find_spec", lambda name: None)
    code, output = run("verify", "t", "--repository", pool_only)
    assert code == 0 and "bf16: not run, it needs torch, transformers: pip install 'tidegate[cloud-llm]'" in output


def test_another_vocabulary_than_the_manifests_is_a_problem(tmp_path: Path) -> None:
    folder = paced_talker(tmp_path)
    manifest = load_manifest(folder)
    assert manifest.generative is not None
    save_manifest(folder, replace(manifest, generative=replace(manifest.generative, vocabulary="0" * 64)))
    code, output = run("verify", "talker", "--repository", tmp_path)
    assert code == 1 and "its vocabulary is " in output


def test_a_manifest_says_how_a_quality_was_measured_and_where_golden_answers_are(pool_only: Path) -> None:
    (variant,) = Repository(pool_only).manifest("t").variants
    assert variant.quality is not None and variant.quality.how == "it is the reference"
    assert variant.golden is not None and variant.golden.name == "golden-bf16.msgpack"
    text = (pool_only / "t" / "1" / "model.yaml").read_text()
    assert "how: it is the reference" in text
    broken = msgspec.structs.replace(variant.golden, name="../golden")
    manifest = replace(Repository(pool_only).manifest("t"), variants=(replace(variant, golden=broken),))
    with pytest.raises(Exception, match=r"golden.name: '../golden' must be a plain file name"):
        save_manifest(pool_only / "x", manifest)
