"""Settings of an agent, from its file and its documents into its parts: real files, a real start after a kill."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_agent.config import EdgeConfig
from edge_agent.configuration.boot import BootConfiguration, boot_configuration
from edge_agent.configuration.effective import settings_of, with_settings
from edge_agent.configuration.record_file import FILE_NAME, ConfigurationFile
from edge_agent.configuration.service import ConfigurationService, NotNow
from edge_agent.core.configuration_trial import ConfigurationRecord, DeviceStanding
from tests.support.edge.rollouts import eventually
from tidegate.config import load
from tidegate.fleet.reported import RolloutState
from tidegate.rollout.desired import DesiredSettings
from tidegate.rollout.device_settings import SettingRefused
from tidegate.runtime.process import StartError

SCOPE = "device/kiosk-1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("TICK_S", 0.02), ("IDLE_S", 0.05), ("FILE_WATCH_S", 0.2), ("REST_S", 0.05)):
        monkeypatch.setattr(f"edge_agent.configuration.service.{name}", seconds)
    monkeypatch.setattr("edge_agent.configuration.boot.FIRST_WATCH_S", 0.2)
    monkeypatch.setattr("tidegate.runtime.followed_file.POLL_S", 0.02)


class Agent:
    """Parts that take a configuration, and are unwell where a test says so."""

    def __init__(self, base: EdgeConfig) -> None:
        self.base = self.config = base
        self.unwell_if: Callable[[EdgeConfig], bool] = lambda _: False
        self.refuses: Exception | None = None
        self.log_level: str | None = None
        self.busy = ""
        self.applied: list[EdgeConfig] = []

    async def apply(self, config: EdgeConfig) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.config, self.log_level = config, None
        self.applied.append(config)

    def standing(self) -> DeviceStanding:
        return DeviceStanding(closed="it is hot" if self.unwell_if(self.config) else "")

    def actual(self) -> dict[str, Any]:
        return {"log_level": self.log_level or self.config.log_level}


def base(folder: Path, **keys: Any) -> EdgeConfig:
    return load(
        EdgeConfig, name="kiosk-1", state_dir=folder / "state", device_file=folder / "mounted" / "device.yaml", **keys
    )


def mount(folder: Path, text: str, number: int = 1) -> None:
    """As the kubelet mounts a ConfigMap: the file is a link through `..data`, which is exchanged as one."""
    root = folder / "mounted"
    inside = root / f"..{number}"
    inside.mkdir(parents=True)
    (inside / "device.yaml").write_text(text)
    (root / "..data_tmp").symlink_to(inside.name)
    os.replace(root / "..data_tmp", root / "..data")
    if not (root / "device.yaml").is_symlink():
        (root / "device.yaml").symlink_to(Path("..data") / "device.yaml")


@asynccontextmanager
async def served(agent: Agent) -> AsyncIterator[ConfigurationService]:
    boot = boot_configuration(agent.base)
    assert boot is not None
    agent.config = boot.config
    service = ConfigurationService(
        boot, apply=agent.apply, standing=agent.standing, actual=agent.actual, busy=lambda: agent.busy
    )
    async with service:
        yield service


def desired(revision: int, *, watch_s: float = 0.1, local: Any = "show", **settings: Any) -> DesiredSettings:
    return DesiredSettings(settings, watch_s, local, SCOPE, revision)


def is_settled(service: ConfigurationService, revision: int, state: RolloutState) -> Callable[[], bool]:
    return lambda: (service.report.revision, service.report.state) == (revision, state)


@pytest.mark.slow
async def test_a_config_map_is_followed_through_its_links_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    mount(tmp_path, "max_queue_size: 5\nstore: {max_rows: 99}\n")
    agent = Agent(base(tmp_path))
    async with served(agent) as service:
        assert agent.config.max_queue_size == 5, "from the first start on"
        await eventually(lambda: service.record.in_force == {"max_queue_size": 5, "store.max_rows": 99})

        mount(tmp_path, "max_queue_size: 6\n", 2)
        await eventually(lambda: agent.config.max_queue_size == 6)
        assert agent.config.store is not None and agent.config.store.max_rows == 100_000, (
            "as its own configuration says"
        )

        mount(tmp_path, "max_queue_size: 7\nmqtt: null\n", 3)
        await eventually(lambda: "key 'mqtt' = None: it cannot be changed" in service.report.file)
        assert agent.config.max_queue_size == 6
    again = boot_configuration(agent.base)
    assert again is not None and again.config.max_queue_size == 6, "also over a start"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_queue_size: many\n", "key 'max_queue_size' = 'many': it must be a whole number from 1 to 4096"),
        ("- 1\n", "it must be a mapping"),
        ("{", "is not YAML"),
        ("a: &a [1, 1]\nb: [*a, *a]\n", "cannot be changed"),
        ("x: " + "[" * 200, "levels deep"),
        ("#" * 70_000, "more than 65536 bytes"),
        ("max_queue_size: 3\nmax_queue_size: 4\n", ""),
        ("\x00", "is not YAML"),
        ("!!python/object/apply:os.system ['true']\n", "device.yaml"),
    ],
)
async def test_whatever_the_file_says_the_agent_serves_on(tmp_path: Path, text: str, words: str) -> None:
    mount(tmp_path, text)
    agent = Agent(base(tmp_path))
    async with served(agent) as service:
        assert words in service.report.file
        assert agent.config.name == "kiosk-1"


async def test_settings_of_a_section_that_the_device_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingRefused, match=r"key 'store.max_rows' = 99: this device has no 'store'"):
        with_settings(base(tmp_path, store=None), {"store.max_rows": 99})


@pytest.mark.slow
async def test_a_document_is_tried_kept_and_there_after_a_start(tmp_path: Path) -> None:
    mount(tmp_path, "")
    agent = Agent(base(tmp_path))
    async with served(agent) as service:
        service.desire(desired(1, max_queue_size=9, slots=4))
        assert service.report.state is RolloutState.PLANNED, "accepted is not kept"
        await eventually(is_settled(service, 1, RolloutState.COMMITTED))
        assert (agent.config.max_queue_size, agent.config.slots) == (9, 1)
        assert [(one.key, one.why) for one in service.report.differs] == [("slots", "start")]
    async with served(agent) as service:
        assert (agent.config.max_queue_size, agent.config.slots) == (9, 4)
        service.desire(desired(1, max_queue_size=9, slots=4))
        await eventually(is_settled(service, 1, RolloutState.COMMITTED))
        assert service.report.differs == ()


@pytest.mark.slow
async def test_documents_that_fall_silent_change_nothing_and_an_empty_one_takes_all_back(tmp_path: Path) -> None:
    mount(tmp_path, "")
    agent = Agent(base(tmp_path))
    async with served(agent) as service:
        service.desire(desired(1, max_queue_size=9))
        await eventually(is_settled(service, 1, RolloutState.COMMITTED))
        service.desire(None)
        await eventually(lambda: service.report.revision == 0)
        assert agent.config.max_queue_size == 9
    async with served(agent) as service:
        assert agent.config.max_queue_size == 9
        service.desire(desired(2))
        await eventually(is_settled(service, 2, RolloutState.COMMITTED))
        assert agent.config.max_queue_size == 64


@pytest.mark.slow
async def test_a_device_that_is_unwell_goes_back_and_tries_again_only_for_another_document(tmp_path: Path) -> None:
    mount(tmp_path, "")
    agent = Agent(base(tmp_path))
    agent.unwell_if = lambda config: config.max_queue_size == 9
    async with served(agent) as service:
        service.desire(desired(1, max_queue_size=9))
        await eventually(is_settled(service, 1, RolloutState.ROLLED_BACK))
        assert service.report.reason == "closed: it is hot"
        assert agent.config.max_queue_size == 64
        tried = len(agent.applied)
        service.desire(desired(1, max_queue_size=9))
        await eventually(is_settled(service, 1, RolloutState.ROLLED_BACK))
        assert len(agent.applied) == tried, "the same document is not tried again"

        agent.unwell_if = lambda _: False
        service.desire(desired(2, max_queue_size=9))
        await eventually(is_settled(service, 2, RolloutState.COMMITTED))
        assert agent.config.max_queue_size == 9


async def test_a_kill_during_the_trial_goes_on_with_it_and_the_third_takes_it_back(tmp_path: Path) -> None:
    mount(tmp_path, "")
    agent = Agent(base(tmp_path))
    async with served(agent) as service:
        service.desire(desired(1, watch_s=600.0, max_queue_size=9))
        await eventually(lambda: agent.config.max_queue_size == 9)
    found = [boot_configuration(agent.base) for _ in range(3)]
    sizes = [one.config.max_queue_size for one in found if one is not None]
    assert sizes == [9, 9, 64]
    async with served(agent) as service:
        service.desire(desired(1, watch_s=600.0, max_queue_size=9))
        await eventually(is_settled(service, 1, RolloutState.ROLLED_BACK))
        assert service.report.reason.startswith("crash_loop: ")


@pytest.mark.slow
async def test_workers_that_do_not_come_up_and_models_that_are_changed_keep_the_settings_away(tmp_path: Path) -> None:
    mount(tmp_path, "")
    agent = Agent(base(tmp_path))
    async with served(agent) as service:
        agent.refuses = StartError("the worker does not come up")
        service.desire(desired(1, threads=2))
        await eventually(is_settled(service, 1, RolloutState.ROLLED_BACK))
        assert "apply: the worker does not come up" in service.report.reason

        agent.refuses, agent.busy = NotNow("a rollout"), "digits 2 is rolled out"
        service.desire(desired(2, threads=3))
        await eventually(lambda: service.report.reason == "later: digits 2 is rolled out")
        assert service.report.state is RolloutState.PLANNED
        agent.refuses, agent.busy = None, ""
        await eventually(is_settled(service, 2, RolloutState.COMMITTED))
        assert agent.config.threads == 3


@pytest.mark.slow
async def test_changes_by_hand_are_shown_and_stay_unless_the_document_undoes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.core.configuration_merge.SHOWN_S", 0.3)
    mount(tmp_path, "max_queue_size: 3\n")
    agent = Agent(base(tmp_path))
    async with served(agent) as service:
        service.desire(desired(1, max_queue_size=9, log_level="warning"))
        await eventually(is_settled(service, 1, RolloutState.COMMITTED))
        agent.log_level = "debug"
        await eventually(lambda: [one.key for one in service.report.differs] == ["log_level", "max_queue_size"])
        assert {one.why for one in service.report.differs} == {"hand"}
        assert agent.config.max_queue_size == 3, "the device's own file wins"

        service.desire(desired(2, local="undo", max_queue_size=9, log_level="warning"))
        await eventually(lambda: service.report.revision == 2 and service.report.differs != ())
        await eventually(lambda: service.report.differs == ())
        assert agent.config.max_queue_size == 9 and agent.actual() == {"log_level": "warning"}
    async with served(agent) as service:
        assert agent.config.max_queue_size == 9, "a start shows nothing anew"


async def test_a_document_that_another_version_of_the_agent_has_accepted_is_named_and_not_followed(
    tmp_path: Path,
) -> None:
    mount(tmp_path, "")
    agent = Agent(base(tmp_path))
    async with served(agent) as service:
        service.desire(desired(1, max_queue_size=9, from_the_future=1))
        await eventually(is_settled(service, 1, RolloutState.FAILED))
        assert "key 'from_the_future' = 1" in service.report.reason
        assert agent.config.max_queue_size == 64
    assert boot_configuration(agent.base) is not None
    assert not (agent.base.state_dir / f"{FILE_NAME}.damaged").exists()


@pytest.mark.slow
async def test_a_disk_that_takes_nothing_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(tmp_path, "")
    agent = Agent(base(tmp_path))

    def full(_self: ConfigurationFile, _record: ConfigurationRecord) -> None:
        raise OSError(28, "No space left on device")

    async with served(agent) as service:
        with monkeypatch.context() as disk:
            disk.setattr(ConfigurationFile, "write", full)
            service.desire(desired(1, max_queue_size=9))
            await eventually(lambda: service.report.reason == "disk: No space left on device")
            assert agent.applied == [] and service.report.state is RolloutState.PLANNED
        await eventually(is_settled(service, 1, RolloutState.COMMITTED))


def test_a_damaged_record_and_settings_that_no_longer_fit_do_not_keep_the_agent_from_its_start(tmp_path: Path) -> None:
    mount(tmp_path, "")
    config = base(tmp_path)
    file = ConfigurationFile(config.state_dir)
    file.write(ConfigurationRecord(in_force={"store.max_rows": 99}))
    found = boot_configuration(base(tmp_path, store=None))
    assert isinstance(found, BootConfiguration) and "has no 'store'" in found.problem
    assert settings_of(found.config) == settings_of(base(tmp_path, store=None))

    (config.state_dir / FILE_NAME).write_bytes(b'{"in_force":{"mqtt":"mqtt://attacker"}}')
    again = boot_configuration(config)
    assert again is not None and again.config.mqtt is None
    assert (config.state_dir / f"{FILE_NAME}.damaged").exists()


def test_an_agent_that_nobody_may_change_reads_and_writes_nothing(tmp_path: Path) -> None:
    assert boot_configuration(load(EdgeConfig, state_dir=tmp_path / "state")) is None
    assert not (tmp_path / "state").exists()
