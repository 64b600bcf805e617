"""The section `agreement`: how many of devices' answers are computed again, and what is kept of those that differ."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from gateway.core.agreement.agreement_watch import EVERY_S
from gateway.core.agreement.expectation import TOLERANCE
from tidegate.config import Section


class AgreementConfig(Section):
    """The agreement guard: docs/agreement.md. An empty section (`agreement: {}`) switches it on as it is meant."""

    share: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Share of devices' answers that are computed again in the pool, in quiet moments; more finds a "
        "drift sooner.",
    )
    pool_share: float = Field(
        0.02,
        gt=0,
        le=1,
        description="Seconds of pools that this may take for each second that they compute for callers; a resting pool "
        "may spend 0.1 % of its time. What is beyond it is not compared.",
    )
    every_s: float = Field(
        EVERY_S,
        ge=0.01,
        le=86_400,
        description="Seconds between two compared answers of one device, at least. Less finds a drift sooner on a busy "
        "device, and asks for more evidence, since false alarms are counted by the month.",
    )
    tolerance: float = Field(
        TOLERANCE,
        ge=1,
        le=100,
        description="How many times the disagreement that the manifest recorded is still agreement; more suits inputs "
        "unlike those that qualities were measured on.",
    )
    remember: int = Field(
        1000, ge=0, le=100_000, description="Disagreements kept for `tidegate model disagreements`: digests and scores."
    )
    inputs_folder: Path | None = Field(
        None,
        description="Folder in which the inputs of disagreements are kept, as .npz files. It then holds what callers "
        "sent. None: no input is kept.",
    )
    inputs_bytes: int = Field(
        64 * 2**20, ge=2**16, description="Bytes of files in `inputs_folder`; beyond, the oldest are deleted."
    )
