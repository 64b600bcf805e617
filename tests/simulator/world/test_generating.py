"""A fleet that generates, on virtual time: every request ends once, batches slow each other down, callers leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from simulator.report.figures import figures, generation_rows
from simulator.scenarios.scenario_file import LoadedScenario, ScenarioError, load, parse
from simulator.simulation import Run, simulate
from simulator.world.arrivals import requests

WRITERS = """
summary: two devices and a pool that write
duration_s: 60
warmup_s: 10
models:
  talker:
    generation:
      edge: {prefill_ms: 2.9, step_ms: [[1, 9], [4, 36]], slots: 4}
      pool: {prefill_ms: 0.1, step_ms: [[1, 12], [8, 14]], slots: 8}
links:
  lan: {delay_ms: 2, jitter: {dist: lognormal, ms: 0.5}}
  wan: {delay_ms: 20, jitter: {dist: lognormal, ms: 4.0}, outages: {every_s: 20, for_s: 1.0, steady: true}}
edges:
  - {name: device, count: 2, link: lan}
pools:
  - {name: card, link: wan}
arrivals: {rate: 2}
classes:
  - name: talk
    share: 1
    model: talker
    length: {median: 50, sigma: 0.5, min: 4, max: 400}
    output: {max_tokens: 400, median: 80, sigma: 0.8, leaves_share: 0.2}
    ttft_ms: 500
    tpot_ms: 40
    budget_ms: 20000
"""


def writers(*edits: tuple[str, str]) -> LoadedScenario:
    text = WRITERS
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return LoadedScenario(parse(text, "test"), Path(), "test")


def ran(loaded: LoadedScenario, policy: str = "value", seed: int = 1) -> Run:
    return simulate(loaded, policy, seed)


@pytest.mark.slow
def test_every_request_ends_once_and_is_counted_with_its_tokens() -> None:
    run = ran(writers())  # `simulate` itself insists on the first
    generations = run.tally.generations
    assert generations.requests == run.tally.all.arrivals > 50
    assert 0 < generations.tokens_in_time <= generations.tokens
    assert run.tally.all.outcomes["cancelled"] > 0
    assert generations.kept / generations.requests > 0.7


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run() -> None:
    one, other = ran(writers()), ran(writers())
    assert one.tally.generations.tokens_in_time == other.tally.generations.tokens_in_time
    assert one.events == other.events


@pytest.mark.slow
def test_a_batch_makes_each_token_slower() -> None:
    few = ran(writers(("rate: 2", "rate: 0.2")), "all-edge").tally.generations
    many = ran(writers(("rate: 2", "rate: 1.5")), "all-edge").tally.generations
    assert few.each.quantile_s(0.5) == pytest.approx(0.009, rel=0.3)
    assert many.each.quantile_s(0.5) > 2.0 * few.each.quantile_s(0.5)


@pytest.mark.slow
def test_a_link_that_stands_still_in_the_middle_of_a_stream_shows_as_a_gap() -> None:
    calm = ran(writers((", outages: {every_s: 20, for_s: 1.0, steady: true}", "")), "all-cloud").tally.generations
    broken = ran(writers(), "all-cloud").tally.generations
    assert calm.gaps.quantile_s(0.99) < 0.3
    assert broken.gaps.quantile_s(0.99) > 0.8


@pytest.mark.slow
def test_a_crash_ends_streams_and_nothing_is_lost() -> None:
    fault = "faults:\n  - {kind: crash, at_s: 20, for_s: 5, target: pool/card}\nclasses:"
    run = ran(writers(("classes:", fault)))
    assert run.tally.generations.requests == run.tally.all.arrivals


@pytest.mark.slow
def test_figures_have_goodput_and_tenths_of_claims() -> None:
    run = ran(writers())
    found = figures([run], load=1.0, rate=2.0)
    assert found.generations is not None
    assert found.generations.goodput[0] == pytest.approx(run.tally.generations.kept / run.counted_s)
    assert {"first", "next", "whole", "all"} == set(found.generations.calibration)
    assert found.plain()["generations"]["kept"][0] > 0.5
    header, line = generation_rows([found])
    assert len(header) == len(line)
    assert 0.0 <= found.generations.worst_gap < 1.0


def test_lengths_go_through_the_quantiles_that_were_given() -> None:
    quantiles = "quantiles: [[0.25, 70], [0.5, 184], [0.9, 939]]"
    loaded = writers(
        ("median: 80, sigma: 0.8", quantiles),
        ("max_tokens: 400", "max_tokens: 5000"),
        ("duration_s: 60", "duration_s: 3000"),
    )
    lengths = sorted(one.output for one in requests(loaded.scenario, 1))
    assert lengths[len(lengths) // 4] == pytest.approx(70, rel=0.15)
    assert lengths[len(lengths) // 2] == pytest.approx(184, rel=0.15)
    assert lengths[9 * len(lengths) // 10] == pytest.approx(939, rel=0.15)


@pytest.mark.parametrize(("edit", "words"), [
    (("median: 80, sigma: 0.8, ", ""), "either median and sigma or quantiles"),
    (("median: 80, sigma: 0.8", "quantiles: [[0.5, 10], [0.2, 20]]"), "quantiles must be two or more"),
    (("leaves_share: 0.2", "leaves_share: 2"), "leaves_share from 0 to 1"),
    (("output: {max_tokens: 400, median: 80, sigma: 0.8, leaves_share: 0.2}", "rows: 1"), "classes[0].output"),
    (("slots: 8", "slots: 0"), "slots 1 or more"),
    (("[[1, 12], [8, 14]]", "[[2, 12]]"), "step_ms must begin with 1"),
    (("    generation:\n", "    edge_ms: [[1, 4]]\n    generation:\n"), "has its own costs"),
    (("links:", "  encoder: {edge_ms: [[1, 4]]}\nlinks:"), "not simulated together"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_key(edit: tuple[str, str], words: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        writers(edit)
    assert words in str(refused.value)


def test_a_model_that_generates_nowhere_is_refused() -> None:
    first = WRITERS.index("      edge:")
    text = WRITERS[:first].rstrip() + " {}\n" + WRITERS[WRITERS.index("links:") :]
    with pytest.raises(ScenarioError, match="generates nowhere"):
        parse(text, "test")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["talk_office", "agents_lte", "talk_far_pool", "talk_jitter"])
def test_the_scenarios_that_come_along_run(name: str) -> None:
    loaded = load(name)
    run = ran(loaded.replaced(loaded.scenario.lasting(24.0)))
    assert run.tally.generations.requests > 20


@pytest.mark.slow
def test_a_far_pool_goes_on_with_what_slow_devices_begin_and_no_token_is_lost() -> None:
    loaded = load("talk_far_pool")
    loaded = loaded.replaced(loaded.scenario.lasting(40.0))
    alone, handing = ran(loaded, "value").tally.generations, ran(loaded, "value-handover").tally.generations
    assert alone.handovers == 0 and handing.handovers > 5 and handing.handover_tokens > 0
    assert handing.wrong == alone.wrong == 0
    assert handing.kept / handing.requests > alone.kept / alone.requests + 0.1


@pytest.mark.slow
def test_a_caller_may_leave_with_the_end_of_what_was_kept_back_for_a_successor() -> None:
    loaded = load("talk_far_pool")
    (kind,) = loaded.scenario.classes
    assert kind.output is not None
    leaving = replace(kind, output=replace(kind.output, leaves_share=0.9))
    run = ran(loaded.replaced(replace(loaded.scenario, classes=(leaving,)).lasting(40.0)), "value-handover", seed=6)
    assert run.tally.generations.requests > 20
    assert run.tally.generations.handovers > 5
    assert run.tally.all.outcomes["cancelled"] > 10
    assert run.tally.generations.wrong == 0
