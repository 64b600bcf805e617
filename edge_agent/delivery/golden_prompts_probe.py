"""The golden prompts probe has a new generation of a generating model answer known prompts before it serves.

One prompt after another, each in one slot of the new worker, so that the device's cores are shared with the generation
that still answers and with nothing else. The work is bounded by what a file may hold (`tidegate/rollout/
golden_prompts.py`), and it ends as soon as the wanted share cannot be reached any more; the time, by the probe's
`timeout_s`. Times, where they are bounded, are those of a token after the first.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Protocol

from edge_agent.delivery.failures import WorkFailed
from edge_agent.delivery.probe_times import HasVariants, compare_times, has_time_bounds, of_new
from tidegate.generate.request import GenerateRequest
from tidegate.generate.teacher_forcing import KnownAnswer, TeacherForcing, TokenAgreement
from tidegate.generate.usage import Generated
from tidegate.rollout.golden_prompts import GoldenPrompts, disagreement, may_still_agree
from tidegate.rollout.plan import Probe
from tidegate.token_sink import TokenSink

INTERVAL_S: Final = 1.0  # a token is never urgent here


class GeneratingRunner(HasVariants, Protocol):
    """The part of a `Runner` that is needed here."""

    @property
    def place(self) -> str: ...
    async def generate(
        self,
        place: str,
        variant: str,
        request: GenerateRequest,
        sink: TokenSink | None,
        *,
        token_interval_s: float,
        first_token_s: float,
    ) -> Generated: ...


async def probe_prompts(
    rules: Probe, prompts: GoldenPrompts, new: GeneratingRunner, old: GeneratingRunner | None
) -> None:
    """Raises WorkFailed with the rule that the new generation breaks, WorkerExited when its worker exits."""
    for variant in new.variants:
        if why := await _disagreement(rules.top1_min or 0.0, prompts, new, variant.name):
            raise WorkFailed(f"probe_accuracy: {variant.name}: {why}")
    if has_time_bounds(rules):
        await compare_times(rules, [partial(_token_s, known) for known in prompts.answers], new, old)


async def _disagreement(least: float, prompts: GoldenPrompts, new: GeneratingRunner, variant: str) -> str:
    positions = sum(known.positions for known in prompts.answers)
    found: list[TokenAgreement] = []
    for known in prompts.answers:
        forcing = TeacherForcing(known)
        while not forcing.is_judged:
            await of_new(forcing.judge_next(partial(_generated, new, variant)))
            if not may_still_agree([*found, forcing.agreement], positions, least):
                return disagreement([*found, forcing.agreement], least)
        found.append(forcing.agreement)
    return disagreement(found, least)


async def _token_s(known: KnownAnswer, runner: GeneratingRunner, variant: str) -> float:
    """Of an answer as long as the known one."""
    request = GenerateRequest(known.prompt, known.positions, ignore_stop=True)
    usage = (await _generated(runner, variant, request, None)).usage
    if usage.completion_tokens < 2:
        return usage.prefill_s
    return usage.decode_s / (usage.completion_tokens - 1)


async def _generated(
    runner: GeneratingRunner, variant: str, request: GenerateRequest, sink: TokenSink | None
) -> Generated:
    return await runner.generate(
        runner.place, variant, request, sink, token_interval_s=INTERVAL_S, first_token_s=INTERVAL_S
    )
