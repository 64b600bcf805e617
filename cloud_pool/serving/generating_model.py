"""A generating model of the pool: the variants of one version that generate, behind the common pipeline.

Each variant has workers of its own (`cloud_pool/workers/generating_workers.py`); batches, coalescing, sequences' state
and relief by a lesser variant are for models with single answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cloud_pool.workers.generating_workers import VariantWorkers
from tidegate import clock
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.work import Work, fits
from tidegate.oip.host import ModelStatistics, TimedCount
from tidegate.outcome import NotSupported
from tidegate.serving.target_model import Computation, Computed


class PoolGeneratingModel:
    """A `TargetModel` over the variants of one version; the first of them that is ready answers when none is demanded.

    Args:
        sandbox: what the workers' sandbox lacks; offered so.
    """

    def __init__(self, server_name: str, variants: Sequence[VariantWorkers], *, sandbox: str | None = None) -> None:
        self._server_name = server_name
        self._by_variant = {one.loadable.variant.name: one for one in variants}
        self._manifest = variants[0].loadable.manifest
        self._variants = tuple(one.loadable.variant for one in variants)
        self._sandbox = sandbox
        self._statistics = ModelStatistics(self._manifest.name, self._manifest.version)

    async def emptied(self) -> None:
        """Wait until no generation waits or runs."""
        await asyncio.gather(*[one.generating.scheduler.drained() for one in self._by_variant.values()])

    @property
    def label(self) -> str:
        return self._manifest.name

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def variants(self) -> Sequence[Variant]:
        return self._variants

    @property
    def ready(self) -> bool:
        return any(one.state == "ready" for one in self._by_variant.values())

    def offer(self) -> ModelOffer:
        first = next((one for one in self._by_variant.values() if one.state == "ready"), None)
        first = first or next(iter(self._by_variant.values()))
        reports = [one.worker_report for one in self._by_variant.values()]
        return ModelOffer(
            self._manifest.name,
            self._manifest.version,
            tuple(_variant_offer(one) for one in self._by_variant.values() if one.state == first.state),
            state=first.state,
            digest=self._variants[0].sha256,
            worker=next((one for one in reports if one is not None), None),
            sandbox=self._sandbox,
        )

    def statistics(self) -> ModelStatistics:
        return self._statistics

    def choose(self, variants: Sequence[Variant], work: Work, demanded: str) -> Variant:
        """The first variant that takes the work, those that are ready before the others."""
        fitting = [one for one in variants if fits(work, max_batch=None, max_tokens=one.max_tokens)]
        if not fitting:
            limits = ", ".join(f"{one.name} up to {one.max_tokens}" for one in variants)
            raise NotSupported(
                f"{self.label!r} on {self._server_name} has no context of {work.longest_row} tokens "
                f"(max_tokens: {limits})"
            )
        return min(fitting, key=lambda one: self._by_variant[one.name].state != "ready")

    async def compute(self, computation: Computation) -> Computed:
        """As `GeneratingVariant.compute`."""
        computed = await self._by_variant[computation.variant.name].generating.compute(computation)
        statistics = self._statistics
        statistics.last_inference_ms = int(clock.utc_s() * 1e3)
        statistics.inference_count += 1
        statistics.execution_count += 1
        statistics.queue.add(computed.queue_s)
        statistics.compute_infer.add(computed.compute_s)
        statistics.batches.setdefault(1, TimedCount()).add(computed.compute_s)
        return computed

    def ended(self, took_s: float, error: BaseException | None) -> None:
        if error is None:
            self._statistics.success.add(took_s)
        elif isinstance(error, Exception):
            self._statistics.fail.add(took_s)

    def __repr__(self) -> str:
        return f"<PoolGeneratingModel {self._manifest.name}:{self._manifest.version} {', '.join(self._by_variant)}>"


def _variant_offer(one: VariantWorkers) -> VariantOffer:
    variant, service = one.loadable.variant, one.generating.service
    return VariantOffer(
        variant.name,
        variant.precision,
        cost=tuple(service.table.points) if service is not None else (),
        max_tokens=variant.max_tokens,
        quality=variant.quality.value if variant.quality is not None else None,
        paced=variant.paced,
        slots=one.generating.scheduler.slots,
        schemas=variant.follows_schemas,
    )
