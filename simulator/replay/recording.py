"""The reader of recordings of real traffic (`tidegate record`): a .tgz of lines, each checked when it is read.

Whatever is wrong is a ScenarioError that names the file, the member and the line. Only the members that are known are
read, each of at most `MOST_BYTES`; nothing is ever unpacked to a disk.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gateway.core.history.trace_format import (
    FORMAT,
    VERSION,
    RecordedEnd,
    RecordedHeader,
    RecordedLine,
    RecordedLink,
    RecordedRequest,
    RecordedTarget,
)
from simulator.scenarios.scenario_file import ScenarioError

MOST_BYTES: Final = 2**30
LineT = TypeVar("LineT", bound=RecordedLine)


@dataclass(frozen=True, slots=True)
class TrafficRecording:
    header: RecordedHeader
    targets: tuple[RecordedTarget, ...]  # in the order of their lines: of one target the last counts
    requests: tuple[RecordedRequest, ...]  # by arrival
    links: tuple[RecordedLink, ...]
    seconds: float


def read(path: Path) -> TrafficRecording:
    """Raises ScenarioError."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            (header, *_) = [*_lines(tar, "header.jsonl", RecordedHeader, path), None]
            if header is None or header.format != FORMAT or header.version != VERSION:
                found = "no header" if header is None else f"{header.format} version {header.version}"
                raise ScenarioError(f"{path}: not a recording that this version reads: {found}, not {FORMAT} {VERSION}")
            requests = sorted(_lines(tar, "requests.jsonl", RecordedRequest, path), key=lambda one: one.at_s)
            targets = tuple(_lines(tar, "targets.jsonl", RecordedTarget, path))
            links = tuple(sorted(_lines(tar, "links.jsonl", RecordedLink, path), key=lambda one: one.at_s))
            ends = tuple(_lines(tar, "end.jsonl", RecordedEnd, path)) if "end.jsonl" in tar.getnames() else ()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ScenarioError(f"{path}: not a recording: {error}") from error
    last_s = requests[-1].at_s + 1e-3 if requests else 0.0  # the gateway went away, or enough had come
    return TrafficRecording(header, targets, tuple(requests), links, ends[-1].seconds if ends else last_s)


def _lines(tar: tarfile.TarFile, name: str, kind: type[LineT], path: Path) -> Iterator[LineT]:
    try:
        member = tar.getmember(name)
    except KeyError:
        raise ScenarioError(f"{path}: not a recording: it has no {name}") from None
    file = tar.extractfile(member)
    if file is None or member.size > MOST_BYTES:
        raise ScenarioError(f"{path}: {name} is no file, or larger than {MOST_BYTES} bytes")
    decode = msgspec.json.Decoder(kind).decode
    for number, line in enumerate(file, 1):
        try:
            yield decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ScenarioError(f"{path}: {name}, line {number}: {error}") from error
