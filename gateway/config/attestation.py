"""The section `attestation`: which evidence of targets is accepted, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from tidegate.config import Section


class AttestationPolicyConfig(Section):
    """Which evidence of targets is accepted (`docs/security.md`)."""

    allowed: Path = Field(
        description="File of attestation keys, a line each as `tidegate attest init` prints it. The gateway follows "
        "the file: a key that is taken out of it is rejected within seconds."
    )
    measurements: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = Field(
        (),
        description="Digests of what targets may run; empty: any that an allowed key signs. A target with another "
        "digest is refused, and `tidegate status` shows its digest.",
    )
    max_age_s: float = Field(
        600.0,
        ge=5,
        le=86400,
        description="Seconds for which evidence counts; it is requested again at about half of that. Less notices a "
        "changed target sooner, and costs each target two signatures each time. Evidence must reach a "
        "request's deadline: budgets beyond 0.4 of this may be refused.",
    )
