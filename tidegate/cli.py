"""The `tidegate` command: an index of subcommands, each of which lives in the part that it belongs to.

Commands are entry points of the group `tidegate.commands`, so this file imports none of the parts and an installation
with one extra stays small. Only the command that is asked for is imported; the one-line help of the others is read
from their source without running it. A command whose libraries are not installed says which extra brings them.

An error that a user can cause (a bad configuration, a model that does not exist, a full disk) is printed as one
message, never as a traceback; everything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

import click

from tidegate.config import ConfigError
from tidegate.models.repository import RepositoryError
from tidegate.outcome import ServeError
from tidegate.runtime.compiled import is_compiled
from tidegate.runtime.lifeline import die_with_parent
from tidegate.runtime.settled_imports import import_structlog, settled_imports
from tidegate.runtime.suggestion import SuggestingGroup
from tidegate.storage.os_error_line import one_line

GROUP: Final = "tidegate.commands"
# The extra that installs the imports of a command; one that is not listed needs none to be imported, or one package.
EXTRAS: Final = {
    "gateway": "gateway",
    "status": "gateway",
    "explain": "gateway",
    "log-level": "gateway",
    "keys": "gateway",
    "edge": "edge",
    "pool": "cloud",
    "model": "build",
    "up": "demo",
}
# The smallest extra that brings a package, for commands that need one only for some of what they do.
BROUGHT_BY: Final = {
    "aiohttp": "gateway", "paho": "gateway", "prometheus_client": "metrics", "jwt": "gateway", "uvloop": "gateway",
    "tokenizers": "gateway", "grpc_health": "gateway", "grpc_reflection": "gateway", "onnxruntime": "edge",
    "torch": "cloud", "safetensors": "cloud", "onnx": "build", "onnxscript": "build", "sklearn": "build",
    "transformers": "build", "opentelemetry": "tracing", "matplotlib": "simulate", "scipy": "simulate", "amqtt": "demo",
    "kopf": "operator",
}  # fmt: skip
_VERSION: Final = "%(prog)s, version %(version)s" + (", compiled" if is_compiled() else "")
OURS: Final = ("gateway", "edge_agent", "cloud_pool", "simulator", "tidegate")


class Commands(SuggestingGroup):
    """A group whose commands are found by entry point and imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(point.name for point in entry_points(group=GROUP))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        point = _entry_point(cmd_name)
        if point is None:
            return None
        try:
            command = _loaded(point)
        except ModuleNotFoundError as error:
            raise _missing(cmd_name, error) from error
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(point.name, _summary(point)) for point in sorted(entry_points(group=GROUP), key=lambda one: one.name)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, RepositoryError, ServeError) as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            raise click.ClickException(one_line(error)) from error
        except ModuleNotFoundError as error:
            raise _missing(ctx.invoked_subcommand or "", error) from error


@click.command(cls=Commands, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tidegate", prog_name="tidegate", message=_VERSION)
@click.option("--die-with-parent", "parent_pid", type=int, hidden=True, help="End when this process, our parent, does.")
def cli(parent_pid: int | None) -> None:
    """One inference endpoint in front of your devices and your GPU pool.

    \b
    Start everything on this machine:  tidegate up
    See what a gateway can reach:      tidegate status
    See why requests went where:       tidegate explain

    \b
    Exit codes: 0 done; 1 it could not be done, with the reason on stderr;
    2 the command line is wrong.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)


def main() -> None:
    # gRPC reads this once, when it is imported. Otherwise it writes an INFO line of its own to stderr whenever a server
    # closes the stream; a lost peer is reported by our own code.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    cli(prog_name="tidegate")


def _loaded(point: EntryPoint) -> Any:
    """The command itself. Its module is imported as a start's imports are, unless something has imported it already."""
    if point.module in sys.modules:
        return point.load()
    with settled_imports():
        import_structlog()
        return point.load()


def _entry_point(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=GROUP, name=name)), None)


def _missing(command: str, error: ModuleNotFoundError) -> Exception:
    """An error that names the extra; a missing module of our own is a defect and is raised unchanged."""
    package = (error.name or "").split(".")[0]
    extra = EXTRAS.get(command) or BROUGHT_BY.get(package)
    if package in OURS or extra is None:
        return error
    return click.ClickException(f"`tidegate {command}` needs {package}: pip install 'tidegate[{extra}]'")


def _summary(point: EntryPoint) -> str:
    """The first line of the command's docstring, read from the source; "" when there is none to read."""
    try:
        spec = importlib.util.find_spec(point.module)
    except ModuleNotFoundError:
        return ""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == point.attr)
    docstring = next((ast.get_docstring(function) for function in functions), None)
    return (docstring or "").partition("\n")[0]


if __name__ == "__main__":
    main()
