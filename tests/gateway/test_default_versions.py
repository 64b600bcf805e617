"""What a request gets that names no version: one that a target serves, whatever operators and machines have done."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from gateway.catalog import Catalog
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.versions.traffic_split import InvalidSplit, TrafficSplits
from gateway.default_versions import DefaultVersions
from gateway.delivery.trials import SplitRequest, Trials
from gateway.host import GatewayHost
from gateway.layers.versions import versions
from gateway.observe.metrics import GatewayMetrics
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import fleet_of, offer, spec
from tests.support.models.tiny_models import double_manifest
from tidegate import clock
from tidegate.fleet.offers import ModelState
from tidegate.models.split.layer_split import SplitHalf
from tidegate.outcome import ModelNotFound, NothingAlive
from tidegate.types import Call, InferRequest, InferResponse, Reply

T = TypeVar("T")
ONE = double_manifest()
# 4 gives another tensor, so that no caller of the others may be answered by it
MANIFESTS = {
    **{version: replace(ONE, version=version) for version in ("1", "2", "3")},
    "4": replace(ONE, version="4", outputs=(replace(ONE.outputs[0], name="z"),)),
}
DEVICES = ("a", "b", "c")
DRAWS = (0.0, 0.04, 0.5, 0.999)
versions_there_are = st.sampled_from(sorted(MANIFESTS))
some_devices = st.sets(st.sampled_from(DEVICES), min_size=1).map(sorted)


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits")


class World:
    """A gateway whose repository holds version 1, with a pool and devices. The catalog keeps what was shipped."""

    def __init__(self) -> None:
        self.shipped: set[str] = set()
        self.running: dict[str, tuple[str, ...]] = {}  # by target: what it serves while it is up
        self.down: set[str] = set()
        self.soaking: set[str] = set()
        self.start(TrafficSplits())

    def start(self, splits: TrafficSplits) -> None:
        """A gateway begins that has heard of no target yet."""
        self.fleet: Fleet = fleet_of()
        self.catalog = Catalog([MANIFESTS["1"]])
        self.catalog.ship(MANIFESTS[one] for one in sorted(self.shipped))
        self.defaults = DefaultVersions(self.catalog, self.fleet, splits)
        self.draw = 0.0
        self.trials = Trials(None, self.defaults, lambda: self.draw, lambda: False)
        self.service = versions(self.defaults, clock.now, lambda: self.draw, self.trials)(self._inner)
        metrics = GatewayMetrics(self.fleet, admission_of(1), version_of=lambda request: "1")
        self.host = GatewayHost("main", self.defaults, self.fleet, metrics, self.service)

    async def _inner(self, call: Call) -> Reply:
        """As the dispatcher answers: where a target offers the version."""
        version = call.request.model_version or self.catalog.manifest("double").version
        if not self.fleet.offered("double", version):
            raise NothingAlive(f"no target offers double version {version}")
        return Reply(InferResponse("double", version, ()))

    def ship(self, version: str) -> None:
        self.shipped.add(version)
        self.catalog.ship([MANIFESTS[version]])

    def serve(self, target: str, *versions: str, soaking: bool = False) -> None:
        """The target serves these from now on, and tells if it is up."""
        self.running[target] = versions
        (self.soaking.add if soaking else self.soaking.discard)(target)
        self.link(target)

    def link(self, target: str) -> None:
        """The target's link comes up if the target is up, with what it serves."""
        if target in self.down:
            return
        if target not in self.fleet.targets:
            self.fleet.add(spec(target), clock.now())
        state: ModelState = "soaking" if target in self.soaking else "ready"
        offers = tuple(replace(offer(state=state), name="double", version=one) for one in self.running[target])
        self.fleet.fold(LinkUp(target, target, 1, offers), clock.now())

    def lose(self, target: str) -> None:
        self.down.add(target)
        if target in self.fleet.targets:
            self.fleet.fold(LinkDown(target, "killed"), clock.now())

    @property
    def offered(self) -> set[str]:
        """What any target offers that this gateway knows."""
        return {one for one in MANIFESTS if self.fleet.offered("double", one)}

    def ask(self, draw: float, version: str = "", **headers: str) -> str:
        """The version that answers. Raises NothingAlive."""
        self.draw = draw
        now = clock.now()
        call = Call(InferRequest("double", (), version), "oip-http", now, now + 1.0)
        return at_once(self.service(replace(call, headers=headers) if headers else call)).response.model_version

    @property
    def default(self) -> str:
        return self.defaults.default("double", clock.now())


class EverySequence(RuleBasedStateMachine):
    """Operators, devices, a pool and the gateway, in any order; between any two steps every request has an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.wanted: dict[str, tuple[str, ...]] = {}  # by device: what a rollout asks of it, not done yet
        self.rollouts: list[tuple[str, dict[str, tuple[str, ...]]]] = []  # version, and what each device had before
        self.before_split: tuple[str, frozenset[str], TrafficSplits] | None = None
        self.moved = False  # whether a target changed since

    @initialize(pool=st.sampled_from([(), ("1",), ("1", "2")]), devices=st.booleans())
    def begin(self, pool: tuple[str, ...], devices: bool) -> None:
        if "2" in pool:
            self.world.ship("2")  # as if of a rollout long ago
        self.world.serve("pool/main", *pool)
        for device in DEVICES:
            self.world.serve(f"edge/{device}", *(("1",) if devices else ()))

    # operators

    @rule(version=versions_there_are, devices=some_devices)
    def rollout(self, version: str, devices: list[str]) -> None:
        self.world.ship(version)
        at_once(self.world.trials.rolled_out("double", version))
        before = {device: self.world.running[f"edge/{device}"] for device in devices}
        self.rollouts.append((version, before))
        self.wanted |= dict.fromkeys(devices, (version,))

    @precondition(lambda self: self.rollouts)
    @rule()
    def rollback(self) -> None:
        version, before = self.rollouts.pop()
        at_once(self.world.trials.recalled("double", version))
        self.wanted |= before

    @rule(
        candidate=versions_there_are, standing=st.none() | versions_there_are, share=st.sampled_from([0.0, 0.05, 1.0])
    )
    def split(self, candidate: str, standing: str | None, share: float) -> None:
        default, offered, splits = self.world.default, self.world.offered, self.world.trials.splits
        try:
            at_once(self.world.trials.begin("double", SplitRequest(candidate, standing or "", share)))
        except InvalidSplit as refusal:
            assert self.world.trials.splits is splits, "what is refused changes nothing"
            assert "double" in str(refusal) or "nothing to split" in str(refusal)
            return
        if standing is None or standing == default:
            assert self.world.default == default, "a split moves its share away from the default, and nothing else"
        else:
            assert not offered or self.world.default == standing
        if standing is None and "double" not in splits.split:
            self.before_split, self.moved = (default, frozenset(offered), splits), False

    @rule()
    def promote(self) -> None:
        split, offered = self.world.trials.splits.split.get("double"), self.world.offered
        try:
            at_once(self.world.trials.promote("double"))
        except InvalidSplit as refusal:
            assert split is None or split.candidate not in offered
            assert "tidegate model" in str(refusal), "a refusal says what to do instead"
            return
        assert split is not None
        assert self.world.default == split.candidate or not offered

    @rule()
    def return_(self) -> None:
        if "double" not in self.world.trials.splits.split:
            with pytest.raises(InvalidSplit, match="no candidate of 'double' is on trial"):
                at_once(self.world.trials.call_back("double"))
            return
        at_once(self.world.trials.call_back("double"))
        if self.before_split is not None:
            default, offered, splits = self.before_split
            if offered == self.world.offered and splits == self.world.trials.splits and not self.moved:
                assert self.world.default == default
        self.before_split = None

    # machines

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), soaking=st.booleans())
    def device_does_what_is_wanted(self, data: st.DataObject, soaking: bool) -> None:
        device = data.draw(st.sampled_from(sorted(self.wanted)))
        self.world.serve(f"edge/{device}", *self.wanted.pop(device), soaking=soaking)
        self.moved = True

    @rule(killed=st.sampled_from([*(f"edge/{one}" for one in DEVICES), "pool/main"]))
    def target_is_killed(self, killed: str) -> None:
        self.world.lose(killed)
        self.moved = True

    @precondition(lambda self: self.world.down)
    @rule(data=st.data())
    def target_is_back(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(sorted(self.world.down)))
        self.world.down.discard(target)
        self.world.link(target)
        self.moved = True

    @rule(remembers=st.booleans())
    def gateway_is_restarted(self, remembers: bool) -> None:
        """With a `trials_file`, or without; targets come back one after another."""
        written = msgspec.json.encode(self.world.trials.splits)
        self.world.start(msgspec.json.decode(written, type=TrafficSplits) if remembers else TrafficSplits())
        self.before_split = None
        for target in self.world.running:
            self.world.link(target)
            self.every_request_is_answered()

    # what always holds

    @invariant()
    def every_request_is_answered(self) -> None:
        world, now = self.world, clock.now()
        offered = world.offered
        reference = world.host.manifest("double").version
        shares = world.defaults.shares("double", now)
        assert world.host.model_ready("double") == bool(offered)
        assert sum(shares.values()) == pytest.approx(1.0 if offered else 0.0)
        assert set(shares) <= offered
        assert not offered or {reference, world.default} <= offered
        for draw in DRAWS:
            if not offered:
                with pytest.raises(NothingAlive, match="version"):
                    world.ask(draw)
            else:
                answered = world.ask(draw)
                assert answered in offered
                assert MANIFESTS[answered].outputs == MANIFESTS[reference].outputs

    @invariant()
    def a_named_version_answers_itself_or_nothing_does(self) -> None:
        for version in MANIFESTS:
            assert self.world.host.model_ready("double", version) == (version in self.world.offered)
            for named in ({"version": version}, {"tidegate-version": version}):
                if version in self.world.offered:
                    assert self.world.ask(0.5, **named) == version
                else:
                    with pytest.raises(NothingAlive, match=f"version {version}"):
                        self.world.ask(0.5, **named)


EverySequence.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestEverySequence = pytest.mark.slow(EverySequence.TestCase)


# the outages that were seen, by name


def world(*targets: tuple[str, str], shipped: tuple[str, ...] = ()) -> World:
    made = World()
    for version in shipped:
        made.ship(version)
    for target, version in targets:
        made.serve(target, version)
    return made


def test_a_promoted_version_that_is_rolled_back_is_the_default_no_longer() -> None:
    one = world(("edge/a", "2"), ("edge/b", "2"), shipped=("1", "2"))
    at_once(one.trials.begin("double", SplitRequest("1", "2", 0.05)))
    at_once(one.trials.call_back("double"))
    assert (one.default, one.trials.splits.promoted) == ("2", {"double": "2"})

    at_once(one.trials.recalled("double", "2"))
    one.serve("edge/a", "1")
    assert {one.ask(draw) for draw in DRAWS} == {"1", "2"}, "requests go back with the devices"
    one.serve("edge/b", "1")
    assert {one.ask(draw) for draw in DRAWS} == {"1"}
    assert one.host.model_ready("double")


def test_a_promoted_version_that_no_target_serves_holds_no_request_up() -> None:
    one = world(("edge/a", "1"), ("edge/b", "2"), shipped=("2",))
    at_once(one.trials.begin("double", SplitRequest("2")))
    at_once(one.trials.promote("double"))
    assert one.ask(0.5) == one.default == "2"

    one.lose("edge/b")
    assert (one.ask(0.5), one.default, one.host.model_ready("double")) == ("1", "1", True)
    one.down.clear()
    one.link("edge/b")
    assert one.ask(0.5) == "2", "the preference outlives the restart of a device"


def test_after_a_finished_rollout_a_split_is_beside_the_new_version() -> None:
    one = world(("edge/a", "2"), ("edge/b", "2"), ("pool/main", "1"), shipped=("1", "2"))
    assert one.default == "2"
    with pytest.raises(InvalidSplit) as refusal:
        at_once(one.trials.begin("double", SplitRequest("2", share=0.05)))
    assert str(refusal.value) == (
        "double 2 is what requests get already that name no version, so there is nothing to split; targets serve "
        "2 (2 edges), 1 (1 pool). To send a part of them to another version: `tidegate model split double 1 --share "
        "5%`; to make that one the default, and 2 its candidate: `tidegate model split double 2 --standing 1`"
    )

    at_once(one.trials.begin("double", SplitRequest("1", share=0.05)))
    assert [one.ask(draw) for draw in (0.04, 0.06, 0.99)] == ["1", "2", "2"]
    at_once(one.trials.call_back("double"))
    assert {one.ask(draw) for draw in DRAWS} == {"2"}


def test_a_split_beside_a_version_that_no_target_serves_is_refused_with_the_command_that_works() -> None:
    one = world(("edge/a", "2"), ("edge/b", "3"), shipped=("2", "3"))
    with pytest.raises(InvalidSplit, match=r"serves double 1,.*3 \(1 edge\), 2 \(1 edge\).*double 2 --standing 3"):
        at_once(one.trials.begin("double", SplitRequest("2", "1")))
    at_once(one.trials.begin("double", SplitRequest("2", "3")))
    one.lose("edge/a")
    with pytest.raises(InvalidSplit, match=r"no target serves double 2.*rollout double --version 2.*return double"):
        at_once(one.trials.promote("double"))
    assert one.default == "3"


def test_a_rollout_after_a_promotion_gets_requests_by_its_devices() -> None:
    one = world(("edge/a", "1"), ("edge/b", "1"), ("pool/main", "2"), shipped=("1", "2"))
    at_once(one.trials.begin("double", SplitRequest("2", "1")))
    at_once(one.trials.promote("double"))
    assert one.defaults.shares("double", clock.now()) == {"2": 1.0}

    one.ship("3")
    at_once(one.trials.rolled_out("double", "3"))
    one.serve("edge/a", "3")
    assert one.defaults.shares("double", clock.now()) == {"2": 0.5, "3": 0.5}
    one.serve("edge/b", "3")
    assert one.defaults.shares("double", clock.now()) == {"3": 1.0}


def test_a_version_with_other_tensors_is_the_default_only_where_it_is_the_only_one() -> None:
    one = world(("edge/a", "1"), ("edge/b", "4"), shipped=("4",))
    assert {one.ask(draw) for draw in DRAWS} == {"1"}
    one.lose("edge/a")
    assert one.host.manifest("double").outputs[0].name == "z", "requests are checked against what answers them"
    assert one.ask(0.5) == "4"


def test_what_is_named_and_not_served_is_refused_with_its_name() -> None:
    one = world(("edge/a", "1"), shipped=("2",))
    with pytest.raises(NothingAlive, match="version 2"):
        one.ask(0.5, "2")


def test_the_models_that_a_mistaken_name_is_told_have_no_halves_of_cut_ones() -> None:
    half = replace(ONE, name=f"{ONE.name}.head-1", half=SplitHalf(ONE.name, "head"))
    with pytest.raises(ModelNotFound, match=rf"known models: {ONE.name}\Z"):
        Catalog([ONE, half]).manifest("mistaken")
