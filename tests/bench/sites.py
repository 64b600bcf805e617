"""Three sites of three hundred devices behind a region's gateway, simulated, against one flat fleet of all of them.

The scenario is `simulator/scenarios/three_sites.yaml`. The same requests, seed by seed, come to one gateway that sees
nine hundred devices at the end of long links (flat), and to one that sees three site gateways, each with three hundred
devices (sites). All of them are the real cores on virtual time. Ratios are within a seed.

    attainment   of the region's callers, sites over flat, at several rates
    summaries    that a site tells a second, and the bytes of one, beside what its devices say in that second
    cut          a third of the requests are sites' own callers'; the link of one site is cut for a third of the run:
                 what its own callers and the region's attain meanwhile, over the same run without the cut
    cost         CPU time of one summary, of a site with 300 devices and with 5,000

    python -m tests.bench.sites [--quick] [--repeats SEEDS]
"""

from __future__ import annotations

from time import process_time
from typing import Final

from msgspec.structs import replace

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkRtt, LinkUp
from gateway.core.fleet.site_summary import summarise
from gateway.core.fleet.target import TargetSpec
from simulator.region import RegionWorld
from simulator.scenarios.scenario import Fault, Scenario
from simulator.scenarios.scenario_file import LoadedScenario, load
from simulator.simulation import World
from simulator.workers.worker import edge_offers
from tests.bench.harness import Goal, Report, Spread, parser, ratios, table
from tidegate.fleet.offers import encode_offers

RATES: Final = (900.0, 1000.0)
QUICK: Final = (900.0,)
CUT_RATE: Final = 600.0
LOCAL: Final = 1 / 3
POLICY: Final = "tidegate"


def as_sites(scenario: Scenario) -> Scenario:
    """The scenario with each group of devices on the network of its site."""
    return replace(scenario, edges=tuple(replace(group, link="lan") for group in scenario.edges))


def attained(loaded: LoadedScenario, rate: float, seed: int, report: Report) -> tuple[float, float]:
    """(attainment flat, over sites) of one seed."""
    scenario = loaded.scenario.with_rate(rate)
    flat = World(loaded.replaced(scenario), POLICY, seed).run()
    region = RegionWorld(loaded.replaced(as_sites(scenario)), POLICY, seed)
    sites = region.run()
    report.figures[f"r{rate:.0f}"] = {
        "busy": flat.compute_s["edge"] / flat.counted_s / sum(group.count for group in scenario.edges),
        "p99_over_flat": sites.tally.all.latencies.quantile_s(0.99) / flat.tally.all.latencies.quantile_s(0.99),
    }
    report.figures["summary"] = {
        "per_second": max(one.summaries for one in region.sites) / region.events.now,
        "bytes": float(max(len(encode_offers(one.offers)) for one in region.sites)),
    }
    return flat.tally.all.attainment, sites.tally.all.attainment


def cut(loaded: LoadedScenario, seed: int) -> tuple[float, float]:
    """What the cut site's own callers, and the region's, attain beside a run without the cut."""
    scenario = as_sites(loaded.scenario.with_rate(CUT_RATE))
    begins_s = scenario.warmup_s + (scenario.duration_s - scenario.warmup_s) / 3
    fault = Fault(kind="partition", target="site/north", at_s=begins_s, for_s=scenario.duration_s / 3)
    found = []
    for faults in ((), (fault,)):
        world = RegionWorld(loaded.replaced(replace(scenario, faults=faults)), POLICY, seed, local_share=LOCAL)
        world.run()
        own = world.sites[0].gateway.tally
        own.check()
        found.append((own.all.attainment, world.tally.all.attainment))
    (own_calm, region_calm), (own_cut, region_cut) = found
    return own_cut / own_calm, region_cut / region_calm


def summary_s(loaded: LoadedScenario, devices: int) -> float:
    """CPU time of one summary of so many devices."""
    scenario = loaded.scenario
    fleet = Fleet(lambda model, _version: scenario.models[model].feature)
    for number in range(devices):
        id = f"edge/{number}"
        fleet.add(TargetSpec(id, "edge", "simulated"), 0.0)
        fleet.fold(LinkUp(id, id, 1, edge_offers(scenario, scenario.edges[1], number % 300)), 0.0)
        fleet.fold(LinkRtt(id, 0.004), 0.0)
    summarise(fleet, 1.0)
    began_s, times = process_time(), 50
    for turn in range(times):
        summarise(fleet, 1.0, turn)
    return (process_time() - began_s) / times


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    seeds = range(1, 1 + (chosen.repeats or (1 if chosen.quick else 2)))
    loaded = load("three_sites")
    if chosen.quick:
        loaded = loaded.replaced(loaded.scenario.lasting(8.0))
    report = Report("sites", {"seeds": len(seeds), "seconds": loaded.scenario.duration_s, "devices": 900, "sites": 3})
    rows, worst = [], 1.0
    for rate in QUICK if chosen.quick else RATES:
        found = [attained(loaded, rate, seed, report) for seed in seeds]
        over_flat = ratios([sites for _, sites in found], [flat for flat, _ in found])
        worst = min(worst, over_flat.median)
        figures = report.figures[f"r{rate:.0f}"]
        figures |= {
            "flat": Spread.of(flat for flat, _ in found),
            "sites": Spread.of(sites for _, sites in found),
            "over_flat": over_flat,
        }
        rows.append(
            (f"{rate:.0f}/s", f"{figures['busy']:.2f}", f"{figures['flat']:.4f}", f"{figures['sites']:.4f}",
             f"{over_flat:.3f}", f"{figures['p99_over_flat']:.2f}")
        )  # fmt: skip
        print(f"  {rate:.0f}/s: {over_flat:.3f} of the flat fleet", flush=True)
    table(("rate", "devices busy", "flat", "sites", "over flat", "p99 over flat"), rows)
    cuts = [cut(loaded, seed) for seed in seeds]
    own, region = Spread.of(one for one, _ in cuts), Spread.of(one for _, one in cuts)
    report.figures["cut"] = {"own_callers": own, "region": region}
    report.figures["summary_s"] = {str(devices): summary_s(loaded, devices) for devices in (300, 5000)}
    print(f"cut off: its own callers {own:.3f}, the region's {region:.3f} of the run without")
    print(f"a summary: {report.figures['summary']}, CPU seconds {report.figures['summary_s']}")
    report.goal(Goal("sites_attainment_over_flat", worst, 0.97))
    report.goal(Goal("sites_summaries_a_second", report.figures["summary"]["per_second"], 1.1, "<="))
    report.goal(Goal("sites_own_callers_while_cut_off", own.median, 0.97))
    report.write()


if __name__ == "__main__":
    main()
