"""A plan states how one model version reaches a device: its files by digest and chunk, and the rules of its rollout.

A plan names everything and contains nothing: each file is an `Artefact`, fetched from any of the document's servers
at `artefact_path(sha256)` by HTTP range and checked chunk by chunk, so that what has arrived is kept for good. The
files are those of a version's folder (`model.yaml`, the variants' artefacts, the tokenizer); the probe's golden cases
are one more artefact, which is not part of the model.

Two digests name a plan. `content` is what would run (version and files): what is quarantined, and what makes a second
rollout of the same model cost no byte. `digest` is the whole plan, rules included.

Durations are seconds, sizes bytes, shares 0 to 1. Keys that are not known are ignored, so that a newer gateway can
speak to an older agent; what an agent must understand is required by the document's `min_agent`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, field

from tidegate.rollout.canonical import canonical, digest_of

MIN_CHUNK_BYTES: Final = 4096
MAX_CHUNK_BYTES: Final = 64 * 1024 * 1024
MAX_ARTEFACT_BYTES: Final = 1 << 40
MANIFEST_PATH: Final = "model.yaml"

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
# One level or more below the version's folder; no level begins with a dot, so none is `..` and none is hidden.
FilePath = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*){0,3}\Z", max_length=200)
]
Seconds = Annotated[float, Meta(ge=0, le=31_536_000)]
Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_ARTEFACT_BYTES)]
ModelName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
Version = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class Artefact(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file by what is in it. Chunk i is bytes [i·chunk, (i+1)·chunk), the last one shorter; `chunks` are digests."""

    path: FilePath
    sha256: Digest
    size_bytes: Annotated[int, Meta(ge=0, le=MAX_ARTEFACT_BYTES)] = field(name="size")
    chunk_bytes: Annotated[int, Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)] = field(name="chunk")
    chunks: tuple[Digest, ...]

    def __post_init__(self) -> None:
        wanted = -(-self.size_bytes // self.chunk_bytes)
        if len(self.chunks) != wanted:
            raise ValueError(
                f"{self.path}: {self.size_bytes} bytes in chunks of {self.chunk_bytes} are {wanted} chunks, "
                f"but {len(self.chunks)} digests are given"
            )


class Warmup(msgspec.Struct, frozen=True, omit_defaults=True):
    """How long a new generation may take to load, and to be warm after it."""

    load_s: Seconds = 300.0
    warm_s: Seconds = 300.0


class Probe(msgspec.Struct, frozen=True, omit_defaults=True):
    """The test that a new generation must pass before any request reaches it.

    Accuracy: against the cases of `golden` (`golden.py`); without it accuracy is not tested. Each bound applies if
    it is given. Of a model that generates these are prompts (`golden_prompts.py`), for which `top1_min` is the one that
    counts. Time: the p95 of the probe's own calls, or of a token, at most `p95_max_s`, and at most `p95_ratio_max` of
    the running generation's, which gets the same cases in turn; without a running one the ratio is not tested.
    """

    golden: Artefact | None = None
    atol: Annotated[float, Meta(ge=0)] | None = None  # largest difference of an element
    cosine_min: Annotated[float, Meta(ge=-1, le=1)] | None = None  # of each output to its expected one
    top1_min: Ratio | None = None  # share of rows with the expected greatest element, or of positions with the token
    p95_max_s: Seconds | None = None
    p95_ratio_max: Annotated[float, Meta(gt=0, le=1000)] | None = None
    repeats: Annotated[int, Meta(ge=1, le=100)] = 5  # how often the cases are run for the times
    timeout_s: Seconds = 300.0


class Soak(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the new generation must do with real requests before it is committed.

    It is committed after `duration_s` and `min_requests` answers. Time without a link to the fleet does not count, so
    that an unreachable device neither commits nor rolls back for it. `timeout_s` of counted time without
    enough requests rolls back (`soak_starved`); 0 waits for ever.
    """

    duration_s: Seconds = field(name="s", default=60.0)
    min_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    err_max: Ratio = 0.05
    p95_ratio_max: Annotated[float, Meta(gt=0, le=1000)] | None = None  # to the generation before, by its last requests
    timeout_s: Seconds = 0.0
    max_exits: Annotated[int, Meta(ge=1, le=100)] = 3  # of the worker or the agent while it soaks: then it rolls back


class Net(msgspec.Struct, frozen=True, omit_defaults=True):
    """What fetching it may cost."""

    metered: Literal["defer", "allow"] = "defer"  # on a link paid by the byte
    max_bytes: Bytes = 0  # fetched in all, retries included; 0: twice the plan's size and 4 chunks
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 20  # failures in a row without a new chunk, then it failed
    deadline_s: Seconds = 86_400.0  # from taking the document in until everything is there, deferrals included


class ModelPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model version for a device.

    `activate`: "handover" starts the new generation beside the old one, and waits (DEFERRED ram) while the memory free
    is less than 1.3 × `ram_bytes`; "stop_start" then stops the old one first, and the model is away meanwhile.
    """

    version: Version = field(name="ver")
    manifest: Digest  # of model.yaml, which is among the files
    files: Annotated[tuple[Artefact, ...], Meta(min_length=1, max_length=64)]
    activate: Literal["handover", "stop_start"] = "handover"
    ram_bytes: Bytes = field(name="ram", default=0)  # resident, of a worker with this model; 0: not known, not checked
    warmup: Warmup = Warmup()
    probe: Probe = Probe()
    soak: Soak = Soak()
    net: Net = Net()
    window: Annotated[str, Meta(pattern=r"^(([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d)?\Z")] = ""  # UTC, for
    # fetching and activating; the end is excluded, and it may pass midnight. "": at any time
    keep: Annotated[int, Meta(ge=1, le=16)] = 2  # committed generations to hold, this one included

    def __post_init__(self) -> None:
        paths = [file.path for file in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("a path is there twice in files")
        if clash := _file_in_a_file(paths):
            raise ValueError(f"files have {clash[0]!r} and {clash[1]!r}: one name cannot be a file and a folder")
        if not any(file.path == MANIFEST_PATH and file.sha256 == self.manifest for file in self.files):
            raise ValueError(f"files have no {MANIFEST_PATH} with the digest that `manifest` names")

    @property
    def content(self) -> str:
        """Names what would run: the version and the files, by their digests."""
        return digest_of(canonical([self.version, sorted((file.path, file.sha256) for file in self.files)]))

    @property
    def digest(self) -> str:
        """Names the whole plan."""
        return digest_of(canonical(self))

    @property
    def artefacts(self) -> tuple[Artefact, ...]:
        """Everything to fetch, the smallest first: what is wrong with a manifest is found before the weights come."""
        golden = (self.probe.golden,) if self.probe.golden else ()
        unique = {artefact.sha256: artefact for artefact in (*self.files, *golden)}
        return tuple(sorted(unique.values(), key=lambda artefact: (artefact.size_bytes, artefact.sha256)))

    @property
    def size_bytes(self) -> int:
        return sum(artefact.size_bytes for artefact in self.artefacts)

    @property
    def max_bytes(self) -> int:
        """The byte budget of fetching."""
        return self.net.max_bytes or 2 * self.size_bytes + 4 * max(one.chunk_bytes for one in self.artefacts)


def _file_in_a_file(paths: Iterable[str]) -> tuple[str, str] | None:
    """A path that another one would lie under, and that one; None if all can exist in one folder."""
    known = set(paths)
    for path in sorted(known):
        above = path
        while above := above.rpartition("/")[0]:
            if above in known:
                return above, path
    return None


def artefact_path(sha256: str) -> str:
    """Where a server of artefacts has it, below its base URL; its ETag is the digest in quotes."""
    return f"/artifacts/sha256/{sha256}"


def in_window(window: str, utc_s: float) -> bool:
    """Whether a UTC instant is within "HH:MM-HH:MM"; an empty window holds all of them."""
    if not window:
        return True
    minute = int(utc_s // 60) % 1440
    begin, end = (int(half[:2]) * 60 + int(half[3:]) for half in window.split("-"))
    return begin <= minute < end if begin <= end else minute >= begin or minute < end
