"""A list of devices becomes bundles, and a bundle becomes a device: wholly or not at all."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from edge_agent.cli import edge
from edge_agent.commands import join as join_module
from edge_agent.commands.join import join_fleet
from edge_agent.config import EdgeConfig
from tests.support.certificates import FleetPki
from tidegate import clock
from tidegate.config import load
from tidegate.security.device_bundle import BundleError, DeviceBundle
from tidegate.security.tls import Tls
from tidegate.tools.pki_cli import pki

ME = ["--owner", "root"] if os.geteuid() == 0 else []


def now() -> datetime:
    return datetime.fromtimestamp(clock.utc_s(), UTC)


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki") / "pki"
    assert CliRunner().invoke(pki, ["init", "--dir", str(folder)]).exit_code == 0
    return folder


def issue(ca: Path, folder: Path, names: str, *words: str) -> Result:
    (folder / "names.txt").write_text(names)
    where = ["--from", str(folder / "names.txt"), "--out", str(folder / "out"), "--broker", "mqtts://broker.internal"]
    return CliRunner().invoke(pki, ["issue", "--dir", str(ca), *where, *words])


def join(bundle: Path, home: Path, *words: str) -> Result:
    return CliRunner().invoke(edge, ["join", str(bundle), "--dir", str(home), *ME, *words])


def snapshot(home: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(home)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(home.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_each_device_of_a_list_gets_a_bundle_of_its_own_and_a_second_run_changes_none(ca: Path, tmp_path: Path) -> None:
    first = issue(ca, tmp_path, "a-1  # the door\n\na-2\n")
    assert first.exit_code == 0 and "2 written, 0 were there already" in first.output, first.output
    files = {one.name: one.read_bytes() for one in (tmp_path / "out").iterdir()}
    assert sorted(files) == ["a-1.tar", "a-2.tar"]
    assert {one.stat().st_mode & 0o777 for one in (tmp_path / "out").iterdir()} == {0o600}
    again = issue(ca, tmp_path, "a-1\na-2\na-3\n")
    assert "1 written, 2 were there already" in again.output
    assert all((tmp_path / "out" / name).read_bytes() == raw for name, raw in files.items())
    assert "3 written" in issue(ca, tmp_path, "a-1\na-2\na-3\n", "--renew").output
    assert (tmp_path / "out" / "a-1.tar").read_bytes() != files["a-1.tar"]


def test_a_list_with_wrong_names_is_refused_whole_and_each_line_is_named(ca: Path, tmp_path: Path) -> None:
    told = issue(ca, tmp_path, "b-1\nKiosk 2\nb-1\n../x\n")
    assert told.exit_code == 1 and not (tmp_path / "out").exists()
    assert "names.txt:2: the name 'Kiosk 2'" in told.output
    assert "names.txt:3: 'b-1' is on line 1 already" in told.output and "names.txt:4:" in told.output


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["--broker", "broker.internal"], "mqtts://host"),
        (["--broker", "mqtt://broker.internal"], "mqtts://"),
        (["--fleet", "a/b"], "the fleet's name 'a/b'"),
        (["edge/b-1"], "neither ROLE/NAME"),
    ],
)
def test_settings_with_which_no_device_could_start_are_refused(
    ca: Path, tmp_path: Path, words: list[str], way_out: str
) -> None:
    told = issue(ca, tmp_path, "b-1\n", *words)
    assert told.exit_code != 0 and way_out in told.output and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_device_that_joins_has_a_configuration_with_which_its_agent_could_start(ca: Path, tmp_path: Path) -> None:
    common = tmp_path / "common.yaml"
    common.write_text("nice: 7\nname: ignored\n")
    issue(ca, tmp_path, "c-1\n", "--fleet", "shops", "--config", str(common))
    done = join(tmp_path / "out" / "c-1.tar", tmp_path / "home")
    assert done.exit_code == 0, done.output
    assert f"tidegate edge --config {tmp_path / 'home' / 'device.yaml'}" in done.output
    config = load(EdgeConfig, tmp_path / "home" / "device.yaml")
    assert (config.name, config.fleet, config.mqtt, config.nice) == ("c-1", "shops", "mqtts://broker.internal", 7)
    assert config.model_repository == tmp_path / "home" / "models"
    assert config.tls is not None and str(Tls(config.tls).issued().identity) == "edge/c-1"  # type: ignore[union-attr]
    assert config.tls.key.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_device_with_the_packages_example_joins_and_the_example_is_put_aside(ca: Path, tmp_path: Path) -> None:
    issue(ca, tmp_path, "kiosk-7\n")
    home = tmp_path / "home"
    home.mkdir()
    example = (Path(__file__).parents[3] / "deploy" / "config" / "device.yaml").read_bytes()
    (home / "device.yaml").write_bytes(example)
    done = join(tmp_path / "out" / "kiosk-7.tar", home)
    assert done.exit_code == 0 and "device.yaml.before-joining" in done.output, done.output
    assert load(EdgeConfig, home / "device.yaml").name == "kiosk-7"
    assert (home / "device.yaml.before-joining").read_bytes() == example


@pytest.mark.slow
def test_a_first_join_that_is_cut_off_between_its_two_links_is_completed_by_the_same_command(
    ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue(ca, tmp_path, "kiosk-5\nkiosk-6\n")
    home = tmp_path / "home"
    home.mkdir()
    (home / "device.yaml").write_text("name: example\n")
    link = join_module.link_atomically

    def only_the_identity(path: Path, target: str) -> None:
        if path.name != "identity":
            raise KeyboardInterrupt
        link(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(join_module, "link_atomically", only_the_identity)
        join_fleet(tmp_path / "out" / "kiosk-5.tar", home, now=now())
    assert (home / "device.yaml").read_text() == "name: example\n"

    other = join(tmp_path / "out" / "kiosk-6.tar", home)
    assert other.exit_code == 1 and "is the device kiosk-5, and" in other.output
    done = join(tmp_path / "out" / "kiosk-5.tar", home)
    assert done.exit_code == 0, done.output
    assert load(EdgeConfig, home / "device.yaml").name == "kiosk-5"
    assert (home / "device.yaml.before-joining").read_text() == "name: example\n"


@pytest.mark.slow
def test_a_damaged_configuration_is_not_blamed_on_the_bundle(ca: Path, tmp_path: Path) -> None:
    issue(ca, tmp_path, "kiosk-4\n")
    home = tmp_path / "home"
    join(tmp_path / "out" / "kiosk-4.tar", home)
    (home / "device.yaml").write_text("name: [kiosk-4\n")
    told = join(tmp_path / "out" / "kiosk-4.tar", home)
    assert told.exit_code == 1 and f"what cannot be read is {home / 'device.yaml'}" in told.output, told.output
    assert join(tmp_path / "out" / "kiosk-4.tar", home, "--replace").exit_code == 0
    assert load(EdgeConfig, home / "device.yaml").name == "kiosk-4"


@pytest.mark.slow
def test_a_damaged_certificate_is_replaced_by_the_devices_own_bundle(ca: Path, tmp_path: Path) -> None:
    issue(ca, tmp_path, "kiosk-8\nkiosk-9\n")
    home = tmp_path / "home"
    join(tmp_path / "out" / "kiosk-8.tar", home)
    cert = home / "identity" / "tls.crt"
    cert.write_bytes(b"")
    other = join(tmp_path / "out" / "kiosk-9.tar", home)
    assert other.exit_code == 1 and "is the device kiosk-8" in other.output
    done = join(tmp_path / "out" / "kiosk-8.tar", home)
    assert done.exit_code == 0, done.output
    assert (home / "identity" / "tls.crt").read_bytes()


@pytest.mark.slow
def test_another_device_is_refused_by_both_names_until_it_is_replaced(ca: Path, tmp_path: Path) -> None:
    issue(ca, tmp_path, "d-1\nd-2\n")
    home = tmp_path / "home"
    join(tmp_path / "out" / "d-1.tar", home)
    before = snapshot(home)
    told = join(tmp_path / "out" / "d-2.tar", home)
    assert told.exit_code == 1 and "is the device d-1" in told.output and "d-2's" in told.output
    assert snapshot(home) == before
    assert join(tmp_path / "out" / "d-2.tar", home, "--replace").exit_code == 0
    assert load(EdgeConfig, home / "device.yaml").name == "d-2" and len(list((home / "identities").iterdir())) == 1


@pytest.mark.slow
def test_a_renewed_bundle_brings_its_certificate_and_leaves_the_owners_changes(ca: Path, tmp_path: Path) -> None:
    issue(ca, tmp_path, "e-1\n")
    home = tmp_path / "home"
    join(tmp_path / "out" / "e-1.tar", home)
    mine = yaml.safe_load((home / "device.yaml").read_text()) | {"threads": 3, "mqtt": "mqtts://other.internal"}
    (home / "device.yaml").unlink()  # as an editor does that replaces a file
    (home / "device.yaml").write_text(yaml.safe_dump(mine))
    key = (home / "identity" / "tls.key").read_bytes()
    issue(ca, tmp_path, "e-1\n", "--renew")
    done = join(tmp_path / "out" / "e-1.tar", home)
    assert done.exit_code == 0 and "differs from the bundle's in mqtt" in done.output, done.output
    config = load(EdgeConfig, home / "device.yaml")
    assert (config.threads, config.mqtt) == (3, "mqtts://other.internal")
    assert (home / "identity" / "tls.key").read_bytes() != key


def wrong_key(mine: DeviceBundle, other: DeviceBundle, _: DeviceBundle) -> DeviceBundle:
    return DeviceBundle(mine.config, mine.cert, other.key, mine.ca)


def wrong_ca(mine: DeviceBundle, _: DeviceBundle, stranger: DeviceBundle) -> DeviceBundle:
    return DeviceBundle(mine.config, mine.cert, mine.key, stranger.ca)


def wrong_name(mine: DeviceBundle, other: DeviceBundle, _: DeviceBundle) -> DeviceBundle:
    return DeviceBundle(other.config, mine.cert, mine.key, mine.ca)


def unknown_key(mine: DeviceBundle, _: DeviceBundle, __: DeviceBundle) -> DeviceBundle:
    return DeviceBundle(mine.config + b"treads: 3\n", mine.cert, mine.key, mine.ca)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (wrong_key, "the key is not that of the certificate"),
        (wrong_ca, "tls.crt is not signed by ca.crt"),
        (wrong_name, "tls.crt is edge/f-1's, and `name` in device.yaml is 'f-2'"),
        (unknown_key, "did you mean 'threads'"),
    ],
)
def test_a_bundle_whose_parts_do_not_fit_changes_nothing(ca: Path, tmp_path: Path, spoil: object, words: str) -> None:
    issue(ca, tmp_path, "f-1\nf-2\n")
    strangers = FleetPki(tmp_path / "strangers")
    mine, other = (DeviceBundle.unpack((tmp_path / "out" / f"f-{one}.tar").read_bytes()) for one in (1, 2))
    stranger = DeviceBundle(b"", b"", b"", strangers.store.ca_cert.read_bytes())
    home = tmp_path / "home"
    join(tmp_path / "out" / "f-1.tar", home)
    before = snapshot(home)
    bad = tmp_path / "bad.tar"
    bad.write_bytes(spoil(mine, other, stranger).pack())  # type: ignore[operator]
    told = join(bad, home, "--replace")
    assert told.exit_code == 1 and words in told.output, told.output
    assert snapshot(home) == before
    bad.write_bytes((tmp_path / "out" / "f-1.tar").read_bytes()[:1500])
    assert join(bad, home).exit_code == 1 and snapshot(home) == before


def test_a_clock_that_is_wrong_and_a_certificate_that_has_ended_are_told_apart(ca: Path, tmp_path: Path) -> None:
    issue(ca, tmp_path, "g-1\n")
    bundle, home = tmp_path / "out" / "g-1.tar", tmp_path / "home"
    for at, words in (
        (datetime(1970, 1, 3, tzinfo=UTC), "the clock was never set"),
        (now() - timedelta(days=2), "clock says"),
        (now() + timedelta(days=200), "the certificate ended on"),
    ):
        with pytest.raises(BundleError, match=words):
            join_fleet(bundle, home, now=at)
    assert not (home / "device.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("nth", range(12))
def test_a_join_that_is_cut_off_anywhere_leaves_the_old_device_or_the_new_one(
    ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    issue(ca, tmp_path, "h-1\nh-2\n")
    home = tmp_path / "home"
    join_fleet(tmp_path / "out" / "h-1.tar", home, now=now())
    text = (home / "device.yaml").read_text()
    (home / "device.yaml").unlink()
    (home / "device.yaml").write_text(text)  # as after an editor
    calls = 0

    def cut(real: object) -> object:
        def step(*arguments: object, **keys: object) -> object:
            nonlocal calls
            calls += 1
            if calls > nth:
                raise KeyboardInterrupt
            return real(*arguments, **keys)  # type: ignore[operator]

        return step

    with monkeypatch.context() as patch:
        for name in ("write_atomically", "link_atomically", "sync_folder"):
            patch.setattr(join_module, name, cut(getattr(join_module, name)))
        try:
            join_fleet(tmp_path / "out" / "h-2.tar", home, now=now(), replace_other=True)
        except KeyboardInterrupt:
            pass
        else:
            assert nth >= calls
    config = load(EdgeConfig, home / "device.yaml")
    assert config.tls is not None
    issued = Tls(config.tls).issued()
    assert issued is not None and issued.identity.name == config.name
    join_fleet(tmp_path / "out" / "h-2.tar", home, now=now(), replace_other=True)
    assert load(EdgeConfig, home / "device.yaml").name == "h-2"
