"""Is a model cut between layers where that is best, and only there? A site's cameras over bandwidth, load and budget.

The scenario is `simulator/scenarios/camera_site.yaml`: six devices on a LAN that take 400 ms for an image, a pool
behind an uplink that takes 12 ms, and three cuts. Simulated, seed by seed with the same requests, over the bandwidth of
the uplink, the rate of requests and their budget:

    edge only      each image on a device (`all-edge`)             the better of these two is what a deployer
    cloud only     each image in the pool (`all-cloud`)            would have set up for one point, by hand
    whole          Tidegate's placement of whole models
    cut            the same with cuts

The *window* is where queueing theory says that a cut is in time and neither of the first two is: M/D/1 waits on the
uplink and at the devices, at no more than `BUSY` of either, within `ROOM` of the budget. Gains are of the point's mean
over seeds, in points of attainment over the better of edge only and cloud only. Outside of the window the cut must not
lose; what is outside is not bad for cuts, theory is only sure of less than the placement finds.

Three points of it are run with real processes: two edge agents, a pool behind a link of `tidegate.netsim`, a gateway,
and models that take their time and have tensors of the right sizes (`engine: paced`), so that two cores do not decide.
In turn within each repeat callers pin images to edges, demand the pool's variant, or demand nothing.

    python -m tests.bench.layer_split [--quick] [--repeats SEEDS]
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import yaml
from msgspec.structs import replace

from simulator.scenarios.scenario_file import LoadedScenario, load
from simulator.simulation import World
from tests.bench.harness import Goal, Report, Spread, parser, table
from tests.support.faults.fleet_stack import FleetStack
from tidegate import clock
from tidegate.engines.paced import PacedModel
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Cost, Manifest, Quality, TensorSpec, Variant, Where
from tidegate.models.repository import save_manifest
from tidegate.models.split.layer_split import LayerSplit, SplitCut, SplitHalf
from tidegate.testing.links import LinkThread
from tidegate.types import Datatype

BUDGETS_MS: Final = (300.0, 700.0)
BANDWIDTHS: Final = (1.0, 3.0, 5.0, 10.0, 20.0, 50.0)
RATES: Final = (2.0, 8.0, 16.0)
QUICK_BANDWIDTHS: Final = (5.0, 50.0)
LEAST_REQUESTS: Final = 300  # of a run: at 2 a second 40 s would be 70
GAIN_AIM, LOSS_AIM = 0.10, -0.01
BUSY, ROOM = 0.8, 0.9
MODEL: Final = "camera"
IMAGE: Final = (1, 3, 224, 224)
IMAGE_BYTES: Final = 3 * 224 * 224
REAL: Final = ((5.0, 2.0, 300.0), (10.0, 6.0, 300.0), (50.0, 2.0, 300.0))  # Mbit/s, requests a second, budget in ms
REAL_S: Final = 25.0
_RUN_IN_S: Final = 6.0
_ROUND_TRIP_S: Final = 0.035


class Point(NamedTuple):
    """One place of the grid."""

    mbit_s: float
    rate: float
    budget_ms: float

    def __str__(self) -> str:
        return f"{self.mbit_s:g} Mbit/s, {self.rate:g}/s, {self.budget_ms:g} ms"


# theory


def waits_s(busy: float, service_s: float) -> float:
    """The mean wait of M/D/1."""
    return busy / (2.0 * (1.0 - busy)) * service_s


def in_time(loaded: LoadedScenario, point: Point, at: str) -> bool:
    """Whether theory is sure of it. Args: at: "edge", "cloud", or the layer of a cut."""
    scenario, budget_s = loaded.scenario, ROOM * point.budget_ms / 1e3
    model, devices = scenario.models[MODEL], sum(group.count for group in scenario.edges)
    cut = next((one for one in model.cuts if one.layer == at), None)
    head = model if cut is None else scenario.models[cut.head]
    tail = model if cut is None else scenario.models[cut.tail]
    found_s = 0.0
    if at != "cloud":
        assert head.edge_ms is not None
        head_s = head.edge_ms[0][1] / 1e3
        if (busy := point.rate * head_s / devices) > BUSY:
            return False
        found_s += head_s + waits_s(busy, head_s) / devices
    if at != "edge":
        assert tail.pool_ms is not None
        wire_s = (IMAGE_BYTES if cut is None else cut.bytes_per_unit) * 8.0 / (point.mbit_s * 1e6)
        if (busy := point.rate * wire_s) > BUSY:
            return False
        found_s += wire_s + waits_s(busy, wire_s) + _ROUND_TRIP_S + tail.pool_ms[0][1] / 1e3
    return found_s <= budget_s


def is_in_window(loaded: LoadedScenario, point: Point) -> bool:
    cuts = [one.layer for one in loaded.scenario.models[MODEL].cuts]
    whole = in_time(loaded, point, "edge") or in_time(loaded, point, "cloud")
    return not whole and any(in_time(loaded, point, layer) for layer in cuts)


# simulated


def scenario_at(loaded: LoadedScenario, point: Point, *, cuts: bool, seconds: float | None) -> LoadedScenario:
    scenario = loaded.scenario.with_rate(point.rate)
    lasts_s = seconds or max(scenario.duration_s, LEAST_REQUESTS / point.rate)
    uplink = replace(scenario.links["uplink"], to_mbit=point.mbit_s)
    models = scenario.models if cuts else {name: replace(one, cuts=()) for name, one in scenario.models.items()}
    classes = tuple(replace(one, budget_ms=point.budget_ms) for one in scenario.classes)
    changed = replace(scenario, links={**scenario.links, "uplink": uplink}, models=models, classes=classes)
    return loaded.replaced(changed.lasting(lasts_s))


def simulated(loaded: LoadedScenario, point: Point, seed: int, seconds: float | None) -> dict[str, float]:
    """Attainment by policy, and the share of requests that were answered in halves."""
    ways = (("edge", "all-edge", False), ("cloud", "all-cloud", False), ("whole", "tidegate", False))
    found = {}
    for name, policy, cuts in (*ways, ("cut", "tidegate", True)):
        tally = World(scenario_at(loaded, point, cuts=cuts, seconds=seconds), policy, seed).run().tally
        found[name] = tally.all.attainment
        found["share"] = tally.cut / max(1, tally.all.arrivals)
    return found


def grid(loaded: LoadedScenario, seeds: range, report: Report, *, quick: bool) -> None:
    rows, window, elsewhere = [], dict[str, float](), dict[str, float]()
    points = [
        Point(mbit_s, rate, budget_ms)
        for budget_ms in (BUDGETS_MS[:1] if quick else BUDGETS_MS)
        for mbit_s in (QUICK_BANDWIDTHS if quick else BANDWIDTHS)
        for rate in (RATES[1:2] if quick else RATES)
    ]
    for point in points:
        runs = [simulated(loaded, point, seed, 15.0 if quick else None) for seed in seeds]
        mean = {name: sum(one[name] for one in runs) / len(runs) for name in runs[0]}
        gain = mean["cut"] - max(mean["edge"], mean["cloud"])
        inside = is_in_window(loaded, point)
        (window if inside else elsewhere)[str(point)] = gain
        name = f"b{point.mbit_s:g}_r{point.rate:g}_d{point.budget_ms:g}"
        report.figures[name] = {
            **{key: Spread.of(one[key] for one in runs) for key in runs[0]},
            "gain": gain,
            "over_whole": mean["cut"] - mean["whole"],
            "in_window": float(inside),
        }
        shown = [f"{mean[key]:.3f}" for key in ("edge", "cloud", "whole", "cut")]
        rows.append((str(point), *shown, f"{mean['share']:.2f}", f"{gain:+.3f}", "window" if inside else ""))
        print(f"  {point}: {gain:+.3f}", flush=True)
    table(("point", "edge", "cloud", "whole", "cut", "in halves", "gain", ""), rows)
    least, lost = min(window.values(), default=None), min(elsewhere.values(), default=None)
    report.figures["window"] = {"points": float(len(window)), "mean_gain": _mean(window.values())}
    report.figures["elsewhere"] = {"points": float(len(elsewhere)), "mean_gain": _mean(elsewhere.values())}
    report.goal(Goal("layer_split_gain_in_window", least, GAIN_AIM, why="" if window else "no point of it was run"))
    report.goal(Goal("layer_split_gain_elsewhere", lost, LOSS_AIM))


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


# real


def paced_repository(root: Path, loaded: LoadedScenario) -> Path:
    """The scenario's model and the halves of its cuts, as models that take their time. Returns `root`."""
    scenario = loaded.scenario
    image = TensorSpec("image", Datatype.UINT8, ("batch", *IMAGE[1:]))
    scores = TensorSpec("scores", Datatype.FP32, ("batch", 1000))
    cuts = []
    for number, one in enumerate(scenario.models[MODEL].cuts, start=1):
        activation = TensorSpec("activation", Datatype.INT8, ("batch", int(one.bytes_per_unit)))
        _add(root, f"{MODEL}.head-{number}", scenario.models[one.head], image, activation, ("edge",), role="head")
        _add(root, f"{MODEL}.tail-{number}", scenario.models[one.tail], activation, scores, ("pool",), role="tail")
        cuts.append(
            SplitCut(
                layer=one.layer,
                head=f"{MODEL}.head-{number}",
                tail=f"{MODEL}.tail-{number}",
                activation="int8",
                bytes_per_row=float(int(one.bytes_per_unit)),
                bytes_per_unit=0.0,
                head_share=0.5,
                cosine=1.0,
                samples=1,
            )
        )
    split = LayerSplit(tuple(cuts))
    _add(root, MODEL, scenario.models[MODEL], image, scores, ("edge", "pool"), split=split)
    return root


def _add(
    root: Path,
    name: str,
    costs: Any,
    taken: TensorSpec,
    given: TensorSpec,
    where: tuple[Where, ...],
    *,
    role: Any = None,
    split: LayerSplit | None = None,
) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    variants = []
    for place in where:
        precision = "int8" if place == "edge" else "fp32"
        path = folder / f"{precision}.paced.yaml"
        pace = PacedModel(
            input=taken.name,
            inputs={taken.name: taken.shape},
            cost_ms=costs.edge_ms if place == "edge" else costs.pool_ms,
            feature="items",
            outputs=(given,),
            noise_sigma=0.05,
        )
        path.write_text(yaml.safe_dump(msgspec.to_builtins(pace)))
        variants.append(
            Variant(
                name=precision,
                artefact=path.name,
                engine="paced",
                precision=precision,
                where=(place,),
                sha256=sha256_of(path),
                size_bytes=path.stat().st_size,
                quality=Quality("cosine", 1.0, 1),
                max_batch=1 if place == "edge" else None,
            )
        )
    save_manifest(
        folder,
        Manifest(
            name=name,
            version="1",
            inputs=(taken,),
            outputs=(given,),
            variants=tuple(variants),
            cost=Cost("items", taken.name),
            axes={"batch": Axis(1, 8)},
            split=split,
            half=None if role is None else SplitHalf(MODEL, role),
        ),
    )


WAYS: Final[Mapping[str, Mapping[str, str]]] = {
    "edge": {"tidegate-pin": "edge"},
    "cloud": {"tidegate-variant": "fp32"},
    "cut": {},
}


class RealRun(NamedTuple):
    """What callers saw in one run."""

    attainment: float
    ways: dict[str, int]  # answers by how they were made


async def asked(http: str, point: Point, headers: Mapping[str, str], seconds: float, seed: int) -> RealRun:
    """Images at Poisson instants from one caller's process, whose own clock says what is in time."""
    draw, url = random.Random(seed), f"{http}/v2/models/{MODEL}/infer"
    spec = {"name": "image", "datatype": "UINT8", "shape": list(IMAGE)}
    head = json.dumps({"inputs": [{**spec, "parameters": {"binary_data_size": IMAGE_BYTES}}]}).encode()
    body = head + bytes(IMAGE_BYTES)
    sent = {
        "inference-header-content-length": str(len(head)),
        "content-type": "application/octet-stream",
        "tidegate-budget-ms": f"{point.budget_ms:g}",
        **headers,
    }
    ways: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(counts: bool) -> bool:
            began_at = clock.now()
            async with session.post(url, data=body, headers=sent) as answer:
                await answer.read()
                took_s = clock.now() - began_at
                way = answer.headers.get("tidegate-route", str(answer.status)).partition(";")[0]
                if counts:
                    ways["split" if "tidegate-split" in answer.headers else way] += 1
                return answer.status == 200 and took_s <= point.budget_ms / 1e3

        tasks, counted, began_at, at = [], [], clock.now(), 0.0
        while at < _RUN_IN_S + seconds:
            await clock.sleep_until(began_at + at)
            task = asyncio.create_task(one(at >= _RUN_IN_S), name="one image")
            tasks.append(task)
            if at >= _RUN_IN_S:
                counted.append(task)
            at += draw.expovariate(point.rate)
        await asyncio.gather(*tasks)
    return RealRun(sum(one.result() for one in counted) / len(counted), dict(ways))


def real(loaded: LoadedScenario, seeds: range, report: Report, *, quick: bool) -> None:
    rows, gains = [], dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="tidegate-cut-") as folder:
        scratch, links = Path(folder), LinkThread()
        models = paced_repository(scratch / "models", loaded)
        uplink = []

        def via(name: str, address: str) -> str:
            if name != "pool":
                return address
            uplink.append(links.link(address, name="uplink", delay_ms=15.0, to_mbit=10.0, from_mbit=40.0))
            return uplink[0].address

        edges: dict[str, dict[str, Any]] = {name: {"warmup_budget_s": 8.0} for name in ("a", "b")}
        try:
            with FleetStack(scratch / "run", models, edges=edges, pool={"warmup_budget_s": 8.0}, via=via) as stack:
                for point in (Point(*one) for one in (REAL[:1] if quick else REAL)):
                    uplink[0].apply(delay_ms=15.0, to_mbit=point.mbit_s, from_mbit=40.0)
                    found: dict[str, list[RealRun]] = {way: [] for way in WAYS}
                    for seed in seeds:
                        for way, headers in WAYS.items():
                            stack.restart_gateway()
                            seconds = 8.0 if quick else REAL_S
                            found[way].append(asyncio.run(asked(stack.http, point, headers, seconds, seed)))
                    spreads = {way: Spread.of(one.attainment for one in runs) for way, runs in found.items()}
                    gain = spreads["cut"].median - max(spreads["edge"].median, spreads["cloud"].median)
                    gains[str(point)] = gain
                    ways = sum((Counter(one.ways) for one in found["cut"]), Counter())
                    share = ways["split"] / max(1, ways.total())
                    name = f"real_b{point.mbit_s:g}_r{point.rate:g}_d{point.budget_ms:g}"
                    report.figures[name] = {**spreads, "gain": gain, "share": share}
                    shown = [f"{one:.3f}" for one in spreads.values()]
                    rows.append((str(point), *shown, f"{share:.2f}", f"{gain:+.3f}"))
                    print(f"  real, {point}: {gain:+.3f}, {dict(ways)}", flush=True)
        finally:
            links.close()
    table(("real point", "edge", "cloud", "cut", "in halves", "gain"), rows)
    inside = [gain for point, gain in zip(REAL, gains.values(), strict=False) if point[0] < 50.0]
    report.goal(Goal("layer_split_real_gain_on_thin_links", min(inside), GAIN_AIM))
    if not quick:
        report.goal(Goal("layer_split_real_gain_on_a_wide_link", list(gains.values())[-1], LOSS_AIM))


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    seeds = range(1, 1 + (chosen.repeats or (1 if chosen.quick else 2)))
    loaded = load("camera_site")
    report = Report("layer_split", {"seeds": len(seeds), "real_s": REAL_S})
    real(loaded, range(1, 2), report, quick=chosen.quick)
    grid(loaded, seeds, report, quick=chosen.quick)
    report.write()


if __name__ == "__main__":
    main()
