"""A link scenario describes a link and its timeline of faults, as one short YAML file.

    summary    one line for people
    source     where the figures come from
    link       what it is like (`StreamProfile`)
    toxics     further layers by name, each for a direction
    timeline   what happens when: a partition or a toxic, from `at_s` on for `for_s`, again every `every_s`

The names of the files in `tidegate/netsim/links/profiles/` are API: `load("lte_driving")` works wherever Tidegate is
installed. Whatever is wrong in a file is an error that names it, the key and what would be right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from tidegate.netsim.file_errors import explained
from tidegate.netsim.links.profile import with_files
from tidegate.netsim.links.stream import Direction, StreamProfile
from tidegate.netsim.proxy.link import BASE, Kind, LinkError, LinkProxy, Traces
from tidegate.runtime.suggestion import did_you_mean

PROFILES: Final = Path(__file__).parents[1] / "links" / "profiles"
T = TypeVar("T")
FILE_MAX_BYTES: Final = 64 * 2**20  # of a recording


class Toxic(StreamProfile, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A layer with its direction. It adds no delay of its own unless it says so."""

    direction: Direction
    delay_ms: float = 0.0


class LinkStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A partition or a toxic at an instant."""

    at_s: float
    for_s: float | None = None  # None: for good
    every_s: float | None = None
    times: int | None = None  # None with `every_s`: for ever
    partition: Kind | None = None
    direction: Direction = "both"
    toxic: Toxic | None = None

    def __post_init__(self) -> None:
        if (self.partition is None) == (self.toxic is None):
            raise ValueError("a step is a partition or a toxic: exactly one of the two keys")
        if self.at_s < 0.0 or (self.for_s is not None and self.for_s < 0.0):
            raise ValueError("at_s and for_s must not be below 0")
        if self.every_s is not None and not self.every_s > (self.for_s or 0.0):
            raise ValueError(f"every_s ({self.every_s}) must be above 0 and above for_s")
        if self.times is not None and (self.every_s is None or self.times < 1):
            raise ValueError("times goes with every_s, and is at least 1")


class LinkScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    summary: str
    source: str = ""
    link: StreamProfile = StreamProfile(delay_ms=0.0)
    toxics: dict[str, Toxic] = {}
    timeline: tuple[LinkStep, ...] = ()

    def __post_init__(self) -> None:
        if BASE in self.toxics:
            raise ValueError(f"toxics: {BASE!r} is the link itself; choose another name")


class LoadedLinkScenario(msgspec.Struct, frozen=True):
    """A scenario with its files read. `name` is how it was asked for."""

    name: str
    scenario: LinkScenario
    folder: Path

    def ready_for(self, link: LinkProxy) -> Callable[[], None]:
        """Read all files; what is returned makes the link like this, in one step that cannot fail.

        Raises:
            LinkError: a file cannot be read.
        """
        ready = [(name, self.ready(toxic), toxic.direction) for name, toxic in self.scenario.toxics.items()]
        base, base_traces = self.ready(self.scenario.link)

        def put_on() -> None:
            link.clear()
            link.tell("scenario", name=self.name, seed=link.seed)
            link.apply(base, traces=base_traces)
            for name, (toxic, traces), direction in ready:
                link.put(name, toxic, direction, traces=traces)

        return put_on

    def ready(self, profile: StreamProfile) -> tuple[StreamProfile, Traces]:
        """A profile with the files that it names. Raises LinkError."""
        return with_its_files(profile, self.name, self.folder)


def with_its_files(profile: StreamProfile, source: str, folder: Path) -> tuple[StreamProfile, Traces]:
    """A profile with its measured jitter, and its recordings; their paths are relative to the folder.

    Raises:
        LinkError: a file cannot be read, or is something else.
    """

    def read(name: str) -> str:
        path = folder / name
        if path.stat().st_size > FILE_MAX_BYTES:
            raise ValueError(f"{path} is larger than {FILE_MAX_BYTES} bytes")
        return path.read_text()

    try:
        profile = with_files(profile, read)
        recording = profile.recording
        if recording is None:
            return profile, None
        to, back = recording.to_target, recording.from_target
        return profile, (recording.parse(to, read(to)), recording.parse(back, read(back)))
    except (OSError, ValueError) as error:
        raise LinkError(f"{source}: {error}") from error


def names() -> tuple[str, ...]:
    """Of the scenarios that come with the package."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.yaml")))


def load(name: str) -> LoadedLinkScenario:
    """The scenario of this name, or in this file.

    Raises:
        LinkError: it does not exist, or is not one.
    """
    path = PROFILES / f"{name}.yaml" if name in names() else Path(name)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        known = f"by name: {', '.join(names())}.{did_you_mean(name, names())}"
        raise LinkError(f"there is no link scenario {name!r}: {error}; {known}") from error
    try:
        return of(yaml.safe_load(text), name, path.parent)
    except yaml.YAMLError as error:
        raise LinkError(f"{path}: not YAML: {error}") from error


def of(raw: Any, name: str, folder: Path) -> LoadedLinkScenario:
    """A scenario of plain values. Raises LinkError."""
    return LoadedLinkScenario(name, convert(raw, LinkScenario, name), folder)


def convert(raw: Any, kind: type[T], source: str) -> T:
    """Plain values as what they should be. Raises LinkError naming the source and the key."""
    if not isinstance(raw, dict):
        raise LinkError(f"{source}: must be a mapping of keys, this is {type(raw).__name__}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise LinkError(f"{source}: {explained(str(error))}") from error
