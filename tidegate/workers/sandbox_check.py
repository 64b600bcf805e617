"""`check_sandbox` says at a process' start what the sandbox of its workers lacks on this machine (`sandbox.py`)."""

from __future__ import annotations

import structlog

from tidegate.fleet.offers import REASON_CHARS
from tidegate.runtime.process import StartError
from tidegate.workers.sandbox import SandboxMode, missing_here

log = structlog.get_logger(__name__)


def check_sandbox(mode: SandboxMode) -> None:
    """Log once what is missing under `auto`. Raises StartError for it under `require`."""
    missing = missing_here() if mode != "off" else ()
    if missing and mode == "require":
        raise StartError(
            f"key 'sandbox': 'require', but this machine has not {'; not '.join(missing)}: 'auto' takes what there is"
        )
    if missing or mode == "off":
        log.warning("workers are not sandboxed in full", sandbox=mode, missing=missing or ("all: it is off",))


def sandbox_gaps(mode: SandboxMode) -> str:
    """What the workers' sandbox lacks here and why, for people; "" where it lacks nothing."""
    return "the key `sandbox` is off" if mode == "off" else "; ".join(missing_here())[:REASON_CHARS]


def sandbox_parts(mode: SandboxMode) -> dict[str, bool]:
    """By part, `files` and `network`, whether it is in force here."""
    missing = {one.partition(":")[0] for one in missing_here()}
    return {part: mode != "off" and not missing & {part, "all"} for part in ("files", "network")}
