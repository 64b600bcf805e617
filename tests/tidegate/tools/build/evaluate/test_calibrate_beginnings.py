"""Tasks with known answers: what a file may hold, when an answer is right, and which options belong together."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tidegate.tools.build.cli import model
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.calibrate_beginnings import KnownTask, Match, is_right, read_tasks

GOOD = '{"prompt": "two plus three", "answer": "5"}\n'


@pytest.mark.parametrize(("text", "match", "right"), [
    (" The answer is 5.", "contains", True),
    ("The answer is 15.", "contains", False),
    ("5 apples", "starts", True),
    ("There are 5", "starts", False),
    (" 5\n", "equals", True),
    ("5!", "equals", False),
    ("it is FIVE", "contains", True),
    ("", "contains", False),
])  # fmt: skip
def test_an_answer_is_right_if_it_has_a_known_one(text: str, match: Match, right: bool) -> None:
    assert is_right(text, ("5", "five"), match) is right


def test_words_of_a_pattern_are_only_words() -> None:
    assert is_right("costs $5 (net)", ("$5 (net)",), "contains")
    assert not is_right("axb", ("a.b",), "contains")


def test_blank_lines_are_left_out_and_an_answer_may_be_one_of_many(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD * 40 + "\n" + '{"prompt": "the capital of France", "answer": ["Paris", "paris"]}\n')
    found = read_tasks(path)
    assert len(found) == 41 and found[-1] == KnownTask("the capital of France", ("Paris", "paris"))


@pytest.mark.parametrize(("content", "words"), [
    (GOOD * 39, "has 39 tasks; 40 to 20000 are wanted"),
    (GOOD * 40 + "{\n", "line 41: is no JSON"),
    (GOOD * 40 + "[]\n", 'line 41: must be {"prompt": "a text", "answer": "a text"}'),
    (GOOD * 40 + '{"prompt": "x", "answer": []}\n', "line 41: must be"),
    (GOOD * 40 + '{"prompt": "x", "answer": ["a", 5]}\n', "line 41: must be"),
    (GOOD * 40 + '{"prompt": " ", "answer": "a"}\n', "line 41: must be"),
])  # fmt: skip
def test_a_file_that_is_no_list_of_tasks_is_refused_by_its_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    with pytest.raises(BuildError) as refused:
        read_tasks(path)
    assert words in str(refused.value) and str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="nowhere"):
        read_tasks(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(("options", "words"), [
    (["--tasks", "t.jsonl", "--data", "d.npz"], "give one of --data and --tasks"),
    (["--tasks", "t.jsonl", "--softmax"], "--softmax is of a classifier"),
    (["--tasks", "t.jsonl", "--measure", "margin"], "with --tasks it is mean or least"),
    (["--tokens", "4"], "--tokens is of a model that generates: give --tasks"),
    (["--measure", "least"], "--measure least is of a model that generates: give --tasks"),
])  # fmt: skip
def test_options_of_classifiers_and_of_generating_models_are_not_mixed(options: list[str], words: str) -> None:
    done = CliRunner().invoke(model, ["calibrate", "any", "--escalate", "10%", *options])
    assert done.exit_code == 2 and words in done.output


def test_a_classifier_takes_no_tasks_and_a_generating_model_no_samples(tmp_path: Path) -> None:
    from msgspec.structs import replace

    from tests.support.models.generative import TALKER
    from tests.tidegate.models.test_confidence import manifest
    from tidegate.models.repository import save_manifest

    for one in (replace(TALKER, version="1"), manifest(name="minilm")):
        (tmp_path / one.name / one.version).mkdir(parents=True)
        save_manifest(tmp_path / one.name / one.version, one)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(GOOD * 40)
    words = ["--escalate", "10%", "--repository", str(tmp_path)]
    refused = CliRunner().invoke(model, ["calibrate", "minilm", "--tasks", str(tasks), *words])
    assert refused.exit_code == 1 and "generates nothing: --tasks is for models that do; give --data" in refused.output
    refused = CliRunner().invoke(model, ["calibrate", "talker", *words])
    assert refused.exit_code == 1 and "generates: it is calibrated with a file of prompts and answers" in refused.output
