"""Named scenarios, files of one's own, and what a timeline does when."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loop import on_virtual_time
from tests.tidegate.netsim.proxy.ends import Client, linked
from tidegate import clock
from tidegate.netsim.links.stream import StreamProfile
from tidegate.netsim.proxy.link import LinkError
from tidegate.netsim.proxy.scenario import load, names, of
from tidegate.netsim.proxy.timeline import LinkTimeline

SHARED_TRACES = Path(__file__).parents[5] / "shared" / "traces"


def test_the_names_that_are_api_are_there() -> None:
    promised = {
        "good_wifi", "lte_driving", "umts_poor", "evdo_outage", "5g_handover", "starlink", "asymmetric_up", "nat_60s",
        "half_open", "flap_fast", "flap_slow", "partition_30s", "partition_1h", "broker_restart", "gateway_restart",
    }  # fmt: skip
    assert promised <= set(names())


@pytest.mark.parametrize("name", names())
@on_virtual_time
async def test_every_scenario_that_comes_along_says_where_its_figures_come_from_and_carries_bytes(name: str) -> None:
    loaded = load(name)
    assert loaded.scenario.summary.endswith(".")
    assert loaded.scenario.source
    async with linked() as link, LinkTimeline(link) as timeline:
        timeline.play(loaded)
        async with Client(link) as client:
            assert 0.0 < await client.ask() < 30.0


@on_virtual_time
async def test_partitions_of_a_timeline_come_go_and_come_again_at_their_instants() -> None:
    scenario = of(
        {"summary": "", "timeline": [{"at_s": 5, "for_s": 3, "every_s": 10, "times": 2, "partition": "blackhole"}]},
        "mine", Path(),
    )  # fmt: skip
    async with linked() as link, LinkTimeline(link) as timeline:
        timeline.play(scenario)
        await clock.sleep(0.5)
        broken = []
        for second in range(25):
            broken += [second] * (link.broken is not None)
            await clock.sleep(1.0)
    assert broken == [5, 6, 7, 15, 16, 17]


@on_virtual_time
async def test_the_end_of_a_step_does_not_undo_what_came_after_it() -> None:
    scenario = of({"summary": "", "timeline": [{"at_s": 1, "for_s": 5, "partition": "blackhole"}]}, "mine", Path())
    async with linked() as link, LinkTimeline(link) as timeline:
        timeline.play(scenario)
        await clock.sleep(2.0)
        link.partition("silent")
        await clock.sleep(10.0)
        assert link.broken == "silent"


@on_virtual_time
async def test_a_partition_by_hand_may_heal_itself_and_a_later_one_stays() -> None:
    async with linked() as link:
        link.partition("blackhole", for_s=1.0)
        await clock.sleep(2.0)
        assert link.broken is None
        link.partition("blackhole", for_s=1.0)
        link.partition("blackhole")
        await clock.sleep(2.0)
        assert link.broken == "blackhole"


@on_virtual_time
async def test_toxics_of_a_timeline_are_put_and_taken_away_and_another_scenario_replaces_all() -> None:
    toxic = {"direction": "to", "delay_ms": 250}
    scenario = of(
        {"summary": "", "toxics": {"always": toxic}, "timeline": [{"at_s": 1, "for_s": 2, "toxic": toxic}]},
        "mine",
        Path(),
    )
    async with linked() as link, LinkTimeline(link) as timeline, Client(link) as client:
        timeline.play(scenario)
        assert await client.ask() == pytest.approx(0.25, abs=0.01)
        await clock.sleep(1.0)
        assert await client.ask() == pytest.approx(0.5, abs=0.01)
        await clock.sleep(2.0)
        assert await client.ask() == pytest.approx(0.25, abs=0.01)
        timeline.play(load("nat_60s"))
        assert link.toxics == ()
        assert "nat_60s" in repr(timeline)


@on_virtual_time
async def test_a_scenario_whose_files_are_missing_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("summary: x\nlink: {recording: {to_target: no.up, from_target: no.down}}\n")
    async with (
        linked(profile=StreamProfile(delay_ms=5.0)) as link,
        LinkTimeline(link) as timeline,
        Client(link) as client,
    ):
        with pytest.raises(LinkError, match=r"no\.up"):
            timeline.play(load(str(tmp_path / "mine.yaml")))
        assert await client.ask() == pytest.approx(0.01, abs=0.001)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "must be a mapping"),
        ("{", "not YAML"),
        ("summary: x\nlink: {delay: 3}\n", r"key 'link\.delay': there is no such key"),
        ("summary: x\nlink: {loss: 1.5}\n", "loss must be"),
        ("summary: x\ntoxics: {slow: {delay_ms: 3}}\n", r"direction' is missing"),
        ("summary: x\ntoxics: {base: {direction: to}}\n", "'base' is the link itself"),
        ("summary: x\ntimeline: [{at_s: 1}]\n", "exactly one of the two"),
        ("summary: x\ntimeline: [{at_s: -1, partition: reset}]\n", "not be below 0"),
        ("summary: x\ntimeline: [{at_s: 1, for_s: 3, every_s: 2, partition: reset}]\n", "every_s"),
        ("summary: x\ntimeline: [{at_s: 1, times: 3, partition: reset}]\n", "times goes with every_s"),
        ("summary: x\ntimeline: [{at_s: 1, partition: flood}]\n", "Invalid enum value 'flood'"),
    ],
)
def test_a_bad_scenario_is_refused_in_words_that_name_the_key(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(LinkError, match=words):
        load(str(path))


def test_a_scenario_that_is_nowhere_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(LinkError, match=r"no link scenario 'lte_diving'.*lte_driving"):
        load("lte_diving")


@pytest.mark.skipif(not SHARED_TRACES.exists(), reason=f"no recordings at {SHARED_TRACES}: they are not ours to ship")
@on_virtual_time
async def test_a_scenario_names_recordings_by_their_path(tmp_path: Path) -> None:
    to, back = SHARED_TRACES / "Verizon-LTE-short.up", SHARED_TRACES / "Verizon-LTE-short.down"
    (tmp_path / "mine.yaml").write_text(
        f"summary: recorded\nlink: {{delay_ms: 20, recording: {{to_target: {to}, from_target: {back}}}}}\n"
    )
    async with linked() as link, LinkTimeline(link) as timeline:
        timeline.play(load(str(tmp_path / "mine.yaml")))
        async with Client(link) as client:
            assert await client.ask() >= 0.04
