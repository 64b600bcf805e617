"""Orders that configure devices: what is carried over, who is asked, and what the command says before it signs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway.delivery.rollouts.order import InvalidOrder, decode_order, plans_of
from tests.support.edge.rollouts import Author, made
from tidegate.fleet.reported import ConfigurationReport, Reported, RolloutState
from tidegate.rollout.desired import DesiredConfiguration, DesiredDocument
from tidegate.rollout.signing import read_unverified, sign_document, verify_document
from tidegate.tools.delivery.configuration_order import (
    ConfigurationTerms,
    chosen_devices,
    make_configuration_order,
)
from tidegate.tools.delivery.configuration_rows import configuration_row
from tidegate.tools.delivery.configure import configure, settings_in
from tidegate.tools.delivery.order import (
    ListedConfiguration,
    ListedDevice,
    OrderError,
    OrderSigning,
    OrderTerms,
    make_order,
)

AUTHOR, OTHER = Author(1), Author(2)
SIGNING = OrderSigning([AUTHOR.key])
WANTED = DesiredConfiguration({"nice": 3}, 30.0, "undo")
TERMS = ConfigurationTerms(WANTED, 100, 200)
SPEC = {"id": "c-1", "waves": (0.5, 1.0)}


def listed(
    name: str, *, document: DesiredDocument | None = None, key: Ed25519PrivateKey = AUTHOR.key, **changes: Any
) -> ListedDevice:
    report = Reported(name, 1, 1, 0, groups=("kiosks",), configuration=ConfigurationReport(RolloutState.COMMITTED, "0"))
    raw = None if document is None else sign_document(document, [key]).decode()
    given = {"freshness": "fresh", "revision": document.revision if document else 0, "reported": report, **changes}
    return ListedDevice(name, document=raw, **given)


def documents(raw: bytes, device: str) -> tuple[DesiredDocument, DesiredDocument]:
    pair = decode_order(raw).documents[device]
    return tuple(verify_document(pair.message(back=back), SIGNING.trusted)[0] for back in (False, True))  # type: ignore[return-value]


def test_models_are_carried_over_and_the_way_back_has_the_settings_before() -> None:
    plan = made("2").plan()
    standing = DesiredDocument(
        4,
        1,
        device="k1",
        models={"double": plan},
        urls=("http://gw:1",),
        configuration=DesiredConfiguration({"nice": 1}),
    )
    raw = make_configuration_order(SPEC, [listed("k1", document=standing), listed("k2")], TERMS, SIGNING)

    forward, back = documents(raw, "k1")
    assert (forward.revision, back.revision) == (5, 6)
    assert forward.models == back.models == {"double": plan} and forward.urls == ("http://gw:1",)
    assert (forward.configuration, back.configuration) == (WANTED, DesiredConfiguration({"nice": 1}))
    assert documents(raw, "k2")[1].configuration == DesiredConfiguration(), "nothing was desired before"
    order = decode_order(raw)
    assert (order.spec.kind, plans_of(order)) == ("configuration", ())


def test_an_order_of_a_model_carries_the_settings_over() -> None:
    standing = DesiredDocument(4, 1, device="k1", configuration=WANTED)
    terms = OrderTerms("double", made("2").plan(), ("http://gw:1",), 100)
    spec = {**SPEC, "model": "double", "version": "2"}
    raw = make_order(spec, [listed("k1", document=standing)], terms, lambda _: made("1").plan(), SIGNING)
    assert [one.configuration for one in documents(raw, "k1")] == [WANTED, WANTED]


def test_a_document_of_a_foreign_key_is_not_signed_over() -> None:
    device = listed("k1", document=DesiredDocument(4, 1, device="k1"), key=OTHER.key)
    with pytest.raises(OrderError, match="newest document of k1 is not by your key"):
        make_configuration_order(SPEC, [device], TERMS, SIGNING)


def test_the_gateway_refuses_an_order_that_contradicts_itself() -> None:
    raw = make_configuration_order(SPEC, [listed("k1")], TERMS, SIGNING)
    order = msgspec.json.decode(raw)
    order["spec"]["version"] = "0" * 16
    with pytest.raises(InvalidOrder, match="does not ask for the configuration 0000"):
        plans_of(decode_order(msgspec.json.encode(order)))
    bad = ConfigurationTerms(DesiredConfiguration({"mqtt": None}), 100, 200)
    with pytest.raises(InvalidOrder, match="key 'mqtt'"):
        plans_of(decode_order(make_configuration_order(SPEC, [listed("k1")], bad, SIGNING)))


def test_those_that_are_alive_are_asked_first_and_those_that_cannot_are_named() -> None:
    has = listed(
        "k0", document=DesiredDocument(1, 1, device="k0", configuration=WANTED),
        configuration=ListedConfiguration("in_sync"),
    )  # fmt: skip
    old = listed("k4", reported=Reported("k4", 1, 1, 0, groups=("kiosks",)))
    deaf = listed("k5", reported=Reported("k5", 1, 1, 0, groups=("kiosks",), takes_rollouts=False))
    other = listed("x", reported=Reported("x", 1, 1, 0, groups=("tills",)))
    every = [listed("k1", freshness="dead"), listed("k2"), listed("k3"), has, old, deaf, other]

    chosen = chosen_devices(every, "kiosks", WANTED)

    assert [one.name for one in chosen.ask] == ["k2", "k3", "k1"]
    assert chosen.have_it == ("k0",)
    assert set(chosen.left_out) == {"k4", "k5"} and "newer one" in chosen.left_out["k4"]
    assert "x" in chosen_devices(every, "all", WANTED).left_out
    with pytest.raises(OrderError, match="there are: kiosks, tills"):
        chosen_devices(every, "kiosk", WANTED)


def test_a_row_says_what_is_desired_and_what_is_reported() -> None:
    device = listed(
        "k1", document=DesiredDocument(7, 1, device="k1", configuration=WANTED),
        configuration=ListedConfiguration("drifted", "by hand: nice is 9 instead of 3"),
    )  # fmt: skip
    row = configuration_row(device)
    assert (row["state"], row["desired"], row["desired_revision"]) == ("drifted", {"nice": 3}, 7)
    assert configuration_row(listed("k2"))["state"] == "-"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_queue_size: 0", "key 'max_queue_size' = 0: it must be a whole number from 1 to 4096"),
        ("mqtt: mqtt://x", "key 'mqtt'"),
        ("{", "is not YAML"),
        ("a: " + "[" * 99, "levels deep"),
        ("#" * 70_000, "more than 65536 bytes"),
    ],
)
def test_a_wrong_file_is_refused_before_a_gateway_is_asked(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "device.yaml"
    file.write_text(text)
    found = CliRunner().invoke(configure, ["kiosks", str(file), "--admin", "http://127.0.0.1:1", "--dry-run"])
    assert found.exit_code == 1 and words in found.output and str(file) in found.output


def test_a_dry_run_says_who_would_be_asked_and_signs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "device.yaml"
    file.write_text("nice: 3\nslots: 2\nstore: {max_rows: 99}\n")
    assert settings_in(file) == {"nice": 3, "slots": 2, "store.max_rows": 99}
    devices = [listed("k1"), listed("k2", freshness="dead")]
    report = {"urls": [], "devices": json.loads(msgspec.json.encode(devices))}
    monkeypatch.setattr("tidegate.tools.delivery.configure.shipping", lambda _gateway: report)

    plain = CliRunner().invoke(configure, ["kiosks", str(file), "--dry-run"])
    assert plain.exit_code == 0, plain.output
    assert "slots = 2, at the agent's next start" in plain.output
    assert "2 devices would be asked, 1 of them when they are back" in plain.output
    as_json = json.loads(CliRunner().invoke(configure, ["kiosks", str(file), "--dry-run", "--json"]).output)
    assert (as_json["ask"], as_json["applies"]["nice"]) == (["k1", "k2"], "worker")
    late = CliRunner().invoke(configure, ["kiosks", str(file), "--dry-run", "--watch", "2h", "--deadline", "1h"])
    assert late.exit_code == 2 and "is not less than --deadline 60 min" in late.output
    refused = CliRunner().invoke(configure, ["kiosks", str(file)])
    assert refused.exit_code == 2 and "--key is needed" in refused.output


def test_settings_that_all_devices_have_are_nothing_to_do_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, chain = tmp_path / "device.yaml", tmp_path / "roots.json"
    file.write_text("nice: 3\n")
    chain.write_text("[]")
    keep = DesiredConfiguration({"nice": 3}, 60.0, "show")
    document = DesiredDocument(2, 1, device="k1", configuration=keep)
    has_them = listed("k1", document=document, configuration=ListedConfiguration("in_sync"))
    report = {"urls": [], "devices": json.loads(msgspec.json.encode([has_them]))}
    monkeypatch.setattr("tidegate.tools.delivery.configure.shipping", lambda _gateway: report)
    command = ["kiosks", str(file), "--key", str(tmp_path / "k.key")]
    done = CliRunner().invoke(configure, command)
    assert (done.exit_code, done.output) == (0, "all 1 devices have these settings already: there is nothing to do\n")
    as_json = CliRunner().invoke(configure, [*command, "--json"])
    assert (as_json.exit_code, json.loads(as_json.output)) == (0, {"id": None, "group": "kiosks"})
    new_keys = CliRunner().invoke(configure, [*command, "--roots", str(chain)])
    assert new_keys.exit_code == 1 and "keys change with what is new for a device only" in new_keys.output


def test_a_document_is_read_by_tools_that_know_of_no_settings() -> None:
    raw = sign_document(DesiredDocument(1, 1, device="k1", configuration=WANTED), [AUTHOR.key])
    assert read_unverified(raw).configuration == WANTED
    plain = msgspec.json.decode(raw)["doc"]
    assert plain["configuration"] == {"local": "undo", "settings": {"nice": 3}, "watch": 30.0}
