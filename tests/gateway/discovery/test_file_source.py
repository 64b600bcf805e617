"""A gateway whose targets are in a file that changes: real links, real requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from gateway.app import Gateway
from gateway.config.discovery import SourceConfig
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, target, until
from tidegate import clock
from tidegate.runtime.process import StartError

pytestmark = pytest.mark.slow


def listed(*fars: Far, **more: object) -> list[dict[str, Any]]:
    return [{"name": far.name.split("/")[1], "address": far.address, **more} for far in fars]


def write(path: Path, targets: Sequence[dict[str, Any]]) -> None:
    """As careful programs do: beside it, then renamed into place."""
    (beside := path.with_suffix(".new")).write_text(yaml.safe_dump({"targets": list(targets)}))
    os.replace(beside, path)


def source(path: Path) -> SourceConfig:
    return SourceConfig(source="file", path=path)


async def state_of(gateway: Gateway, session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get(gateway.addresses["admin"] + "/v1/state") as response:
        return await response.json()


async def test_targets_come_and_go_with_the_file(tmp_path: Path) -> None:
    one, two, path = Far("pool/one"), Far("pool/two"), tmp_path / "targets.yaml"
    async with running(one, two):
        write(path, listed(one))
        async with gateway_for(configured(tmp_path, discovery=(source(path),))) as (gateway, session):
            assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/one"
            write(path, listed(two))
            await until(lambda: "pool/two" in gateway.fleet.targets and gateway.fleet.targets["pool/two"].up)
            async with asyncio.timeout(10.0):
                while (await ask(gateway, session))[2]["tidegate-served-by"] != "pool/two":
                    await clock.sleep(0.02)
            left = gateway.fleet.targets["pool/one"]
            assert left.up and "does not list it" in left.state(clock.now())[1]
            state = await state_of(gateway, session)
            assert {target["id"]: target["source"] for target in state["targets"]} == {
                "pool/one": f"file:{path}",
                "pool/two": f"file:{path}",
            }
            assert state["sources"][0]["name"] == f"file:{path}" and state["sources"][0]["away"] == ""


async def test_a_broken_or_missing_file_leaves_its_targets_and_is_a_condition(tmp_path: Path) -> None:
    far, path = Far("pool/one"), tmp_path / "targets.yaml"
    async with running(far):
        write(path, listed(far))
        async with gateway_for(configured(tmp_path, discovery=(source(path),))) as (gateway, session):

            async def ails() -> list[str]:
                return [one["evidence"] for one in (await state_of(gateway, session))["ailing"]]

            async def until_ails(word: str) -> None:
                async with asyncio.timeout(10.0):
                    while not any(word in words for words in await ails()):
                        await clock.sleep(0.05)

            path.write_text("targets:\n- name: one\n  addres: h:1\n")
            await until_ails(f"{path}:3: unknown key 'targets.0.addres'")
            assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/one"
            path.unlink()
            await until_ails("cannot read the targets file")
            assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/one"
            write(path, listed(far))
            async with asyncio.timeout(10.0):
                while await ails():
                    await clock.sleep(0.05)


async def test_a_file_that_is_moved_away_and_back_is_in_use_again(tmp_path: Path) -> None:
    far, path = Far("pool/one"), tmp_path / "targets.yaml"
    async with running(far):
        write(path, listed(far))
        async with gateway_for(configured(tmp_path, discovery=(source(path),))) as (gateway, _):
            of_file = gateway.found.sources[f"file:{path}"]
            path.rename(aside := tmp_path / "aside")
            await until(lambda: of_file.why != "")
            aside.rename(path)  # the very same file: inode, size and time are as before
            await until(lambda: of_file.why == "")


async def test_a_target_that_moves_keeps_its_id_and_what_was_learned_of_it(tmp_path: Path) -> None:
    before, after, path = Far("pool/one"), Far("pool/one"), tmp_path / "targets.yaml"
    async with running(before, after):
        write(path, listed(before))
        async with gateway_for(configured(tmp_path, discovery=(source(path),))) as (gateway, session):
            assert (await ask(gateway, session))[0] == 200
            view = gateway.fleet.targets["pool/one"]
            cost = gateway.fleet.offered("echo", "3")[0].cost
            write(path, listed(after))
            await until(lambda: view.spec.address == after.address and view.up)
            assert gateway.fleet.targets["pool/one"] is view
            assert gateway.fleet.offered("echo", "3")[0].cost is cost
            await before.kill()
            for _ in range(5):
                assert (await ask(gateway, session))[0] == 200


async def test_a_target_that_was_dropped_and_comes_back_has_what_was_learned_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.core.fleet.found_targets.LINGER_S", 0.2)
    before, after, path = Far("pool/one"), Far("pool/one"), tmp_path / "targets.yaml"
    async with running(before, after):
        write(path, listed(before))
        async with gateway_for(configured(tmp_path, discovery=(source(path),))) as (gateway, session):
            assert (await ask(gateway, session))[0] == 200
            cost, link = gateway.fleet.offered("echo", "3")[0].cost, gateway.fleet.targets["pool/one"].link
            write(path, [])
            await until(lambda: "pool/one" not in gateway.fleet.targets)
            assert (await ask(gateway, session))[0] == 503
            write(path, listed(after))
            await until(lambda: gateway.host.model_ready("echo"))
            assert gateway.fleet.offered("echo", "3")[0].cost is cost
            assert gateway.fleet.targets["pool/one"].link is link
            assert (await ask(gateway, session))[0] == 200


async def test_draining_in_the_file_takes_a_target_out_of_placement_and_back(tmp_path: Path) -> None:
    one, two, path = Far("pool/one"), Far("pool/two"), tmp_path / "targets.yaml"
    async with running(one, two):
        write(path, listed(one, two))
        async with gateway_for(configured(tmp_path, discovery=(source(path),))) as (gateway, session):
            write(path, [*listed(one, draining=True), *listed(two)])
            await until(lambda: len(gateway.fleet.offered("echo", "3")) == 1)
            for _ in range(5):
                assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/two"
            write(path, listed(one, two))
            await until(lambda: len(gateway.fleet.offered("echo", "3")) == 2)


async def test_an_id_of_the_gateways_own_list_is_refused_by_name(tmp_path: Path) -> None:
    far, path = Far("pool/one"), tmp_path / "targets.yaml"
    async with running(far):
        write(path, [{"name": "one", "address": "127.0.0.1:1"}])
        config = configured(tmp_path, target(far), discovery=(source(path),))
        async with gateway_for(config) as (gateway, session):
            assert (await ask(gateway, session))[0] == 200
            (ailing,) = (await state_of(gateway, session))["ailing"]
            assert (ailing["target"], ailing["condition"]) == ("pool/one", "id_conflict")
            assert "static said it first" in ailing["evidence"]


async def test_a_file_that_is_broken_at_the_start_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "targets.yaml"
    with pytest.raises(StartError, match=r"key 'discovery', file:.*cannot read the targets file"):
        async with Gateway(configured(tmp_path, discovery=(source(path),))):
            pass
