"""The command `tidegate record` writes real traffic and links to a file for `tidegate simulate --replay`."""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import IO, Final

import click
import msgspec
from rich.console import Console

from gateway.commands.admin_reader import stream_admin
from gateway.core.history.trace_format import (
    AnyRecordedLine,
    RecordedEnd,
    RecordedHeader,
    RecordedLink,
    RecordedRequest,
    RecordedTarget,
)
from tidegate.admin_client import AdminError, admin_option
from tidegate.runtime.duration import Duration, printed_duration
from tidegate.storage.atomic_file import replacing
from tidegate.storage.output_file import OutputFile

MEMBERS: Final = {
    RecordedHeader: "header.jsonl",
    RecordedTarget: "targets.jsonl",
    RecordedRequest: "requests.jsonl",
    RecordedLink: "links.jsonl",
}
_ABOUT: Final = """A recording of a Tidegate gateway's traffic; docs/recording.md has the format.

In it: when requests came, for which model, with how much work, with which demands (budget, priority, variant, pin),
to which target they were sent, with which outcome and which times; the targets with their models and costs; each
target's link, second by second.

Not in it: tensors, texts, request ids, trace ids, headers, addresses, credentials. Tenants are aliases that mean
something within this file only. Names of models and of targets are unchanged: check them before you pass the file on.
"""
_EXAMPLES = """\b
Examples:
  tidegate record --for 60s -o monday.tgz
  tidegate simulate --replay monday.tgz --policy tidegate,least-request
  tidegate simulate --replay monday.tgz --more-devices kiosk-1=5
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "--for",
    "for_s",
    type=Duration(bare="s", above_zero=True),
    default="60s",
    show_default=True,
    help="How long; an hour at most.",
)
@click.option("-o", "--output", type=OutputFile(), required=True, help="The file to write (.tgz).")
@click.option("--most", type=click.IntRange(1), default=None, help="Stop after so many requests.")
@click.option("--max-mb", type=click.IntRange(1), default=512, show_default=True, help="Stop at so many MB of lines.")
@admin_option
def record(for_s: float, output: Path, most: int | None, max_mb: int, admin: str) -> None:
    """Record the requests of a running gateway and the state of its links, without bodies and ids.

    The file holds when requests came, their work, their outcome and their times, what each target offers at which cost,
    and its link second by second. `tidegate simulate --replay` answers how the same traffic fares with another policy,
    more devices or another link.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(_folder_beside(output))
        files: dict[type, IO[bytes]] = {
            kind: stack.enter_context(open(folder / name, "wb")) for kind, name in MEMBERS.items()
        }
        status = stack.enter_context(Console(stderr=True).status(f"recording {admin} for {printed_duration(for_s)}"))
        lines = stack.enter_context(stream_admin(admin, f"/debug/recording?for={for_s:g}", silent_s=30.0))
        recording = _RecordingFiles(files, most or sys.maxsize, max_mb * 10**6)
        with suppress(KeyboardInterrupt):  # what was received until then is kept
            recording.take(lines)
        status.stop()
        for file in files.values():
            file.close()
        with replacing(output) as packed:
            _pack(packed, folder, recording.end)
    _print_summary(output, recording)


@contextmanager
def _folder_beside(output: Path) -> Iterator[Path]:
    """A folder for what comes, on the file system that is to take it: what cannot be written is told at once."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise click.ClickException(
            f"-o {output}: nothing can be written to {output.parent}: {error.strerror}"
        ) from error


class _RecordingFiles:
    """Writes each line into the file of its kind, up to a number of requests and bytes. Mutable: the counts."""

    def __init__(self, files: Mapping[type, IO[bytes]], most: int, most_bytes: int) -> None:
        self.requests = 0
        self.in_time = 0
        self.end: RecordedEnd | None = None
        self.enough = ""  # why it stopped by itself
        self.cut = ""  # why the stream ended early
        self._files = files
        self._most = most
        self._most_bytes = most_bytes

    def take(self, lines: Iterable[bytes]) -> None:
        """Write lines until they end. Raises OSError: the disk takes no more."""
        decode = msgspec.json.Decoder(AnyRecordedLine).decode
        taken = 0
        for raw in self._until_cut(lines):
            if not raw.endswith(b"\n"):
                self.cut = "a line was cut off"
                return
            taken += len(raw)
            if taken > self._most_bytes:
                self.enough = f"stopped at {self._most_bytes // 10**6} MB (--max-mb)"
                return
            line = decode(raw)
            if isinstance(line, RecordedEnd):
                self.end = line
                return
            self._files[type(line)].write(raw)
            if isinstance(line, RecordedRequest):
                self.requests += 1
                self.in_time += line.in_time
                if self.requests >= self._most:
                    self.enough = f"stopped after {self._most} requests (--most)"
                    return

    def _until_cut(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield what comes. What fails in writing it is no end of the stream, so it is not caught here."""
        try:
            yield from lines
        except (OSError, HTTPException, AdminError) as error:
            self.cut = str(error) or type(error).__name__


def _pack(packed: Path, folder: Path, end: RecordedEnd | None) -> None:
    with tarfile.open(packed, "w:gz") as tar:
        about = tarfile.TarInfo("README")
        about.size = len(_ABOUT.encode())
        tar.addfile(about, io.BytesIO(_ABOUT.encode()))
        for name in MEMBERS.values():
            tar.add(folder / name, arcname=name)
        if end is not None:
            encoded = msgspec.json.encode(end) + b"\n"
            last = tarfile.TarInfo("end.jsonl")
            last.size = len(encoded)
            tar.addfile(last, io.BytesIO(encoded))


def _print_summary(output: Path, recording: _RecordingFiles) -> None:
    share = f", {recording.in_time / recording.requests:.1%} in time" if recording.requests else ""
    click.echo(f"{output}: {recording.requests} requests{share}, {output.stat().st_size / 1e6:.2f} MB")
    if recording.enough:
        click.echo(recording.enough, err=True)
    elif recording.end is None:
        why = f" ({recording.cut})" if recording.cut else ""
        click.echo(f"the stream ended early{why}: the file holds what was received until then", err=True)
    elif recording.end.lost:
        click.echo(f"{recording.end.lost} lines were lost because they were not taken fast enough", err=True)
    if not recording.requests:
        click.echo("no request came in that time: there is nothing to replay", err=True)
        if recording.end is None and not recording.enough:  # that none came is an answer, that the stream broke is not
            sys.exit(1)
