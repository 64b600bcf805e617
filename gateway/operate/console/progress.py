"""The console's rollout rows: rollouts under way and the last finished ones, each with its progress and its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from gateway.core.versions.canary import CanaryRollout, DeviceStep, RolloutPhase
from gateway.operate.console.verdict import ConsoleFinding

SHOWN: Final = 6
_NOT_GOING: Final = {RolloutPhase.PAUSED: "is paused", RolloutPhase.RETURNING: "is called back"}
_THERE: Final = {RolloutPhase.RETURNING: DeviceStep.BACK, RolloutPhase.RETURNED: DeviceStep.BACK}


def rollout_rows(rollouts: Iterable[CanaryRollout]) -> list[dict[str, Any]]:
    """Return a row for each rollout under way, then for the newest of the others."""
    newest_first = list(rollouts)[::-1]
    newest_first.sort(key=lambda one: one.state.phase.is_over)
    return [_rollout_row(one) for one in newest_first[:SHOWN]]


def rollout_findings(rollouts: Iterable[CanaryRollout]) -> list[ConsoleFinding]:
    """Return a finding for each rollout that is paused, or on its way back."""
    return [
        ConsoleFinding("attention", f"The rollout of {one.spec.model} {one.spec.version} {what}: {one.state.reason}")
        for one in rollouts
        if (what := _NOT_GOING.get(one.state.phase))
    ]


def _rollout_row(waves: CanaryRollout) -> dict[str, Any]:
    spec, state = waves.spec, waves.state
    steps = Counter(part.step for part in state.parts.values())
    devices = len(spec.devices)
    return {
        "id": spec.id,
        "model": spec.model,
        "version": spec.version,
        "phase": str(state.phase),
        "reason": state.reason,
        "wave": state.wave + 1,
        "waves": len(spec.sizes),
        "devices": devices,
        "steps": {str(step): steps[step] for step in DeviceStep if steps[step]},
        "done_share": round(steps[_THERE.get(state.phase, DeviceStep.SUCCEEDED)] / devices, 4),
        "elapsed_s": round(state.elapsed_s, 1),
    }
