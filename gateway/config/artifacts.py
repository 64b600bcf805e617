"""The section `artifacts`: where model files for devices lie, and how devices may fetch them."""

from __future__ import annotations

from math import inf
from pathlib import Path

from pydantic import Field

from tidegate.config import Section


class ArtifactsConfig(Section):
    """Model files for devices, and the rollouts that bring them there.

    One gateway of a fleet has this section, or several that have a `store`.
    """

    folder: Path = Field(
        description="Folder of model files, one for each content, and of the rollouts' journals. It belongs to this "
        "gateway alone; what rollouts have done and must still do is remembered nowhere else."
    )
    host: str | None = Field(None, description="Address of the artefact port; none: as `host` of the gateway.")
    port: int | None = Field(
        8004,
        ge=0,
        le=65535,
        description="Port from which devices fetch model files; 0 takes a free one. None: no port, if another web "
        "server serves the folder.",
    )
    advertise: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+(/[^\s]*[^/\s])?$",
        description="How devices reach that port, http://HOST:PORT or https://HOST:PORT. Default: what it listens on.",
    )
    max_concurrent: int = Field(
        16, ge=1, le=4096, description="Downloads at once; further devices get 503 and retry after some seconds."
    )
    bytes_per_s: float | None = Field(
        None,
        ge=16_384,
        description="Bytes a second of all downloads together, so that requests keep their share of the link; none: no "
        "limit. Downloads share it evenly.",
    )
    max_artifact_bytes: int = Field(
        16 * 2**30, gt=0, description="Largest file that is accepted; a larger one is refused."
    )

    max_partials: int = Field(
        64, ge=2, le=4096, description="Unfinished uploads in all; one credential may have half of them."
    )
    max_partial_bytes: int = Field(
        64 * 2**30, gt=0, description="Bytes of unfinished uploads in all; one credential may have half of them."
    )
    partials_kept_s: float = Field(
        86_400.0, gt=0, description="Seconds after which an unfinished upload that has not grown is removed."
    )

    @property
    def rate(self) -> float:
        return inf if self.bytes_per_s is None else self.bytes_per_s
