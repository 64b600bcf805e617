"""The `tidegate` command and `tidegate config`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points, metadata
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tidegate import cli as door
from tidegate.config import ConfigError, ProcessConfig, load
from tidegate.models.repository import RepositoryError
from tidegate.outcome import ModelNotFound
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.tools import config_cli


class KettleConfig(ProcessConfig):
    model_config = SettingsConfigDict(env_prefix="TIDEGATE_KETTLE_")
    name: str = Field(description="What the kettle is called.")
    boil_s: float = Field(default=3.0, description="Seconds to boil; more of it costs patience.")
    tags: tuple[str, ...] = Field(default=("steel",), description="Words.")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(door.cli, list(arguments), prog_name="tidegate")


def offer(monkeypatch: pytest.MonkeyPatch, command: click.Command | Exception) -> None:
    """Add a command called `kettle`, which comes with an extra."""

    class Point:
        name = module = "kettle"

        def load(self) -> click.Command:
            if isinstance(command, Exception):
                raise command
            return command

    monkeypatch.setattr(door, "entry_points", lambda **_selection: [Point()])
    monkeypatch.setattr(door, "EXTRAS", {"kettle": "hot"})


def failing(error: Exception) -> click.Command:
    @click.command()
    def kettle() -> None:
        raise error

    return kettle


def test_every_command_of_the_parts_is_listed() -> None:
    listed = run("--help").output
    assert all(f"  {name} " in listed for name in ("config", "edge", "gateway", "model", "pool", "status", "up"))


@pytest.mark.slow
def test_help_shows_what_a_command_does_without_importing_it() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from tidegate.cli import cli;"
        "print(CliRunner().invoke(cli, ['--help']).output);"
        "print('imported', sorted({'tidegate.tools.up.cli', 'aiohttp', 'grpc', 'gateway.cli'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "Start everything on this machine: broker, pool, edges and gateway." in said
    assert said.endswith("imported []\n")


def test_the_version_is_told() -> None:
    assert run("--version").output.startswith("tidegate, version ")


def test_an_unknown_command_is_an_error_of_usage() -> None:
    answer = run("gatway")
    assert answer.exit_code == 2
    assert "No such command 'gatway'" in answer.output


@pytest.mark.parametrize("when", ["when it is imported", "when it is run"])
def test_a_command_whose_libraries_are_missing_says_which_extra_brings_them(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    missing = ModuleNotFoundError("No module named 'steam.engine'", name="steam.engine")
    offer(monkeypatch, missing if when == "when it is imported" else failing(missing))
    answer = run("kettle")
    assert answer.exit_code == 1
    assert answer.output == "Error: `tidegate kettle` needs steam: pip install 'tidegate[hot]'\n"


def test_a_missing_module_of_our_own_is_not_blamed_on_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ModuleNotFoundError("No module named 'tidegate.gone'", name="tidegate.gone"))
    assert isinstance(run("kettle").exception, ModuleNotFoundError)


@pytest.mark.parametrize(
    "error", [ConfigError("unknown key 'prot'"), ModelNotFound("no model 'x'"), RepositoryError("model.yaml: bad")]
)
def test_an_error_that_a_user_can_mend_is_one_message(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    offer(monkeypatch, failing(error))
    answer = run("kettle")
    assert (answer.exit_code, answer.output) == (1, f"Error: {error}\n")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "/x/model.onnx"), "/x/model.onnx: No space left on device"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (PermissionError(13, "Permission denied", b"/x"), "/x: Permission denied"),
        (
            OSError(28, "No space left on device", "mine.onnx", None, "/x/model.onnx"),
            "/x/model.onnx: No space left on device",
        ),
        (OSError(5, "Input/output error", "mine.onnx", None, "/x/model.onnx"), "mine.onnx: Input/output error"),
    ],
)
def test_what_the_system_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, error: OSError, words: str) -> None:
    offer(monkeypatch, failing(error))
    answer = run("kettle")
    assert (answer.exit_code, answer.output) == (1, f"Error: {words}\n")


def test_a_pipe_whose_reader_has_ended_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, failing(BrokenPipeError(32, "Broken pipe")))
    answer = run("kettle")
    assert (answer.exit_code, answer.output) == (1, "")


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ZeroDivisionError("ours"), TimeoutError("which has no number")):
        offer(monkeypatch, failing(error))
        assert run("kettle").exception is error


def test_an_example_says_every_key_with_its_meaning_and_changes_nothing() -> None:
    text = config_cli.example_yaml("kettle", KettleConfig)
    assert yaml.safe_load(text) == {"name": None}  # only what is required is not commented out
    assert "# Seconds to boil; more of it costs patience.\n#boil_s: 3.0\n" in text
    assert "TIDEGATE_KETTLE_NAME" in text


@pytest.mark.slow
def test_the_schema_of_each_process_is_json_that_describes_each_key() -> None:
    for role in config_cli.roles():
        schema = json.loads(run("config", "schema", role).output)
        undescribed = [key for key, field in schema["properties"].items() if not field.get("description")]
        assert not undescribed, role


def test_an_unknown_role_is_answered_with_the_known_ones() -> None:
    answer = run("config", "schema", "broker")
    assert answer.exit_code == 1
    assert "there are: edge, gateway, pool" in answer.output


def test_a_file_with_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text("grpc_prot: 9000\n")
    answer = run("config", "check", str(file), "--for", "edge")
    assert answer.exit_code == 1
    assert "unknown key 'grpc_prot'; did you mean 'grpc_port'?" in answer.output


@pytest.mark.parametrize("role", sorted(point.name for point in entry_points(group="tidegate.configs")))
def test_the_example_of_each_process_can_be_read_back(role: str, tmp_path: Path) -> None:
    """With its defaults uncommented: what an example prints must be what the process accepts."""
    model = config_cli.config_model(role)
    file = tmp_path / f"{role}.yaml"
    file.write_text(uncommented(config_cli.example_yaml(role, model)))
    required = {key: "x" for key, one in model.model_fields.items() if one.is_required()}
    assert load(model, file).model_dump() == load(model, None, **required).model_dump()


def uncommented(text: str) -> str:
    """Keys stand as `#key:`, those of a section as `#  key:`, words as `# words`; required ones get a value."""
    lines = [line if re.match("# [^ ]", line) else line.removeprefix("#") for line in text.splitlines()]
    return "\n".join(line.replace("  # required", " x") for line in lines if not line.startswith("#"))


def test_a_command_that_does_not_exist_is_answered_with_the_ones_that_are_like_it() -> None:
    told = run("statsu")
    assert told.exit_code == 2
    assert "No such command 'statsu'. Did you mean 'status'" in told.output
    assert "Did you mean" not in run("xyzzy").output


def test_an_option_that_does_not_exist_is_answered_with_the_one_that_is_like_it() -> None:
    for words, meant in ((("up", "--edgs", "3"), "--edges"), (("config", "check", "a", "--fo", "edge"), "--for")):
        told = run(*words)
        assert told.exit_code == 2
        assert re.search(rf"Did you mean.*{meant}", " ".join(told.output.split())), told.output


@pytest.mark.parametrize(
    "words", [("--models", "typo"), ("--ship", "typo.pub"), ("--link", "pol=lte_driving"), ("--edges", "-1")]
)
def test_up_with_a_mistyped_option_leaves_nothing_behind(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run("up", *words)
    assert told.exit_code != 0 and words[1].partition("=")[0] in told.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "mqt://u:s3cret@broker",
        "mqtt://u:s3@s3cret@broker:99999",
        "mqtt://u:s3cret@[broker",
        "mqtt://u:s3cret@127.0.0.1:1",
        "mqtt://u:s3cret\u2100@broker",  # of which urllib's error shows all but the scheme
    ],
)
def test_no_password_of_the_broker_is_shown_by_up(url: str, tmp_path: Path) -> None:
    told = run("up", "--broker", url, "--data-dir", str(tmp_path), "--ports-from", "24000")
    assert told.exit_code == 1 and "--broker" in told.output and "s3cret" not in told.output


@pytest.mark.parametrize(
    "words", [("status",), ("explain",), ("top", "--once"), ("record", "-o", "x"), ("log-level",), ("model", "index")]
)
def test_one_variable_names_the_gateway_for_every_command(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEGATE_ADMIN", "http://127.0.0.1:1")
    assert "no gateway answers at http://127.0.0.1:1:" in run(*words).output
    assert "TIDEGATE_ADMIN" in run(*words, "--help").output


def groups(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Group]]:
    if isinstance(command, click.Group):
        yield path, command
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from groups(below, *path, name)


@pytest.mark.slow
def test_every_group_answers_a_mistyped_command_with_the_ones_that_are_like_it() -> None:
    found = dict(groups(door.cli))
    assert {(), ("config",), ("keys",), ("keys", "signing"), ("edge", "store"), ("model",), ("fleet",)} <= set(found)
    for path, group in found.items():
        name = group.list_commands(click.Context(group))[-1]
        mistyped = f"{name[:-1]}x{name[-1]}"
        told = run(*path, mistyped)
        assert told.exit_code == 2, (path, mistyped, told.output)
        text = " ".join(told.output.split())
        assert re.search(rf"No such command '{mistyped}'. Did you mean .*'{name}'", text), (path, text)
        # New versions of click give a hint by themselves, so the text alone would not show a group without ours.
        assert isinstance(group, SuggestingGroup), path


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("link", "--upstream", "7001", "--scenario", "lte_drivin"), "lte_driving"),
        (("simulate", "ofice_wifi"), "office_wifi"),
        (("simulate", "office_wifi", "--policy", "valu"), "value"),
        (("config", "schema", "gatway"), "gateway"),
    ],
)
def test_an_unknown_name_is_answered_with_the_ones_that_are_like_it_and_with_all(
    words: tuple[str, ...], meant: str
) -> None:
    told = run(*words)
    text = " ".join(told.output.split())
    assert told.exit_code != 0
    assert re.search(rf"Did you mean .*'{meant}'", text) and re.search(rf"(there are|by name): .*{meant}", text), text


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("link",), ("config", "check")])
def test_help_is_asked_for_in_short_at_every_command(words: tuple[str, ...]) -> None:
    # In a process of its own: click keeps a command's help option as it was when it was first asked for.
    command = [sys.executable, "-m", "tidegate", *words]
    short, full = (
        subprocess.run([*command, option], capture_output=True, text=True, timeout=60, check=True).stdout
        for option in ("-h", "--help")
    )
    assert short == full and "Usage: tidegate" in short


@pytest.mark.slow
def test_the_package_is_the_command_too() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tidegate", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.startswith("tidegate")


def test_a_link_to_a_url_is_refused_in_words_that_say_what_is_wanted() -> None:
    told = run("link", "--upstream", "http://127.0.0.1:80")
    assert told.exit_code == 2
    assert "'http://127.0.0.1:80' is a URL" in told.output and "HOST:PORT" in told.output


PACKAGES = {
    "gateway": "aiohttp uvloop paho prometheus_client tokenizers jwt grpc_health grpc_reflection",
    "edge": "aiohttp uvloop onnxruntime paho grpc_health grpc_reflection",
    "cloud": "torch safetensors uvloop grpc_health grpc_reflection",
    "build": "torch onnx onnxruntime onnxscript safetensors sklearn tokenizers transformers",
    "simulate": "matplotlib scipy",
    "tracing": "opentelemetry",
    "demo": "amqtt",
    "operator": "kopf",
}
# Imports every command of the command line where the packages that are named cannot be imported, and prints what each
# says. Then runs those that need a package only when they work.
WALK = """
import sys
for package in sys.argv[1].split():
    sys.modules[package] = None
import click
from click.testing import CliRunner
from tidegate.cli import cli

def leaves(words, command):
    if not isinstance(command, click.Group):
        yield words
        return
    for name in command.list_commands(click.Context(command)):
        try:
            inner = command.get_command(click.Context(command), name)
        except click.ClickException as error:
            print(f"{name}: {error.message}")
            continue
        yield from leaves((*words, name), inner)

working = [("model", "quantize", "a.onnx", "b.onnx"), ("model", "add", "m", "--edge", "a.onnx"),
           ("model", "pack", "folder", "x.safetensors")]
for words in [*(one + ("--help",) for one in leaves((), cli)), *working]:
    result = CliRunner().invoke(cli, words)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    if "pip install" in result.output and "--help" not in words:
        print(" ".join(words[:2]) + ": " + result.output.strip())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("gateway", ("gateway: `tidegate gateway` needs", "fleet: `tidegate fleet` needs paho")),
        ("edge", ("edge: `tidegate edge` needs uvloop", "fleet: `tidegate fleet` needs paho")),
        ("cloud", ("pool: `tidegate pool` needs", "model pack: Error: this needs torch and safetensors")),
        ("build", ("model quantize: Error: this needs onnx", "model add: Error: this needs onnx")),
        ("simulate tracing demo", ()),
    ],
)
def test_without_an_extra_every_command_works_or_says_which_one_is_missing(extra: str, said: tuple[str, ...]) -> None:
    # torch is left out in every case, since to import it takes longer than all else.
    blocked = " ".join(("torch", *(PACKAGES[one] for one in extra.split())))
    ended = subprocess.run(
        [sys.executable, "-c", WALK, blocked], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert all("pip install 'tidegate[" in line for line in lines)
    assert all(any(line.startswith(one) for line in lines) for one in said), lines


def test_each_package_is_brought_by_an_extra_that_is_there() -> None:
    assert set(door.BROUGHT_BY) == set(" ".join(PACKAGES.values()).split())
    assert set(door.BROUGHT_BY.values()) <= set(metadata("tidegate").get_all("Provides-Extra") or ())
