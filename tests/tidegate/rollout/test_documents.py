"""Documents of a rollout: one spelling, signed, bounded, and merged over one another."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from tests.support.models.artefacts import artefact_of
from tests.support.mqtt.device_messages import Device, register
from tidegate.fleet.messages import BadMessage
from tidegate.fleet.reported import ModelReport, RolloutState
from tidegate.fleet.topics import Topics
from tidegate.rollout.canonical import is_canonical
from tidegate.rollout.desired import DesiredDocument, decode_desired, desired_models, encode_desired
from tidegate.rollout.golden import BadGolden, decode_golden, encode_golden, inaccuracy
from tidegate.rollout.plan import Artefact, ModelPlan, Net, Probe, Soak, in_window
from tidegate.rollout.signing import SignatureRefused, id_of, keys_after, public_text, sign_document, verify_document
from tidegate.types import Datatype

OLD, NEW, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
MANIFEST, WEIGHTS = artefact_of("model.yaml", b"name: digits"), artefact_of("int8.onnx", bytes(10_000), 4096)


def plan(version: str = "2", **changes: Any) -> ModelPlan:
    return ModelPlan(version, MANIFEST.sha256, (MANIFEST, WEIGHTS), **changes)


def document(revision: int = 1, **changes: Any) -> DesiredDocument:
    fields: dict[str, Any] = {"device": "kiosk-1", "models": {"digits": plan()}}
    return DesiredDocument(revision, 1_763_775_000, **(fields | changes))


def keys(*private: Ed25519PrivateKey) -> dict[str, bytes]:
    return {id_of(key): key.public_key().public_bytes_raw() for key in private}


def test_a_document_comes_back_as_it_was_written() -> None:
    probe = Probe(golden=artefact_of("golden", b"cases"), atol=0.02, p95_ratio_max=1.5)
    whole = document(
        models={"digits": plan(probe=probe, soak=Soak(10.0, 5), net=Net("allow"), window="22:00-04:30", ram_bytes=9)},
        remove=("old",), urls=("https://gw:8443",), min_agent="0.1",
    )  # fmt: skip
    raw = encode_desired(whole)
    assert decode_desired(raw) == whole
    assert is_canonical(raw)


@pytest.mark.parametrize("below", ["int8.onnx/part", "int8.onnx/deep/part"])
def test_a_file_and_a_folder_of_one_name_are_refused_when_the_plan_is_made_and_when_it_comes(below: str) -> None:
    words = rf"files have 'int8\.onnx' and '{below}': one name cannot be a file and a folder"
    part, beside = artefact_of(below, b"part"), artefact_of("int8.onnx-part/more", b"part")
    with pytest.raises(ValueError, match=words):
        ModelPlan("2", MANIFEST.sha256, (MANIFEST, WEIGHTS, part))
    fine = document(models={"digits": ModelPlan("2", MANIFEST.sha256, (MANIFEST, WEIGHTS, beside))})
    raw = encode_desired(fine).replace(beside.path.encode(), below.encode())
    with pytest.raises(BadMessage, match=words):
        decode_desired(raw)


@pytest.mark.parametrize(
    "spelling",
    [b'{"b":1,"a":2}', b'{"a": 2}', b'{"a":1,"a":2}', b"{", b"\xff", b'{"a":1.0e0}', b"[" * 5000],
)
def test_another_spelling_of_json_is_not_canonical(spelling: bytes) -> None:
    assert not is_canonical(spelling)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "", "group": ""}, "one `device` or one `group`"),
        ({"group": "all"}, "one `device` or one `group`"),
        ({"remove": ("digits",)}, "in `models` and in `remove`"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        document(**change)


@pytest.mark.parametrize("path", ["../etc/passwd", "/etc/passwd", ".hidden", "a/../b", "a//b", "", "a\n", "a/b/c/d/e"])
def test_a_path_that_could_leave_its_folder_is_refused(path: str) -> None:
    raw = msgspec.json.decode(encode_desired(document()))
    raw["models"]["digits"]["files"][0]["path"] = path
    with pytest.raises(BadMessage, match="path"):
        decode_desired(msgspec.json.encode(raw, order="sorted"))


def test_an_artefact_has_as_many_digests_as_chunks() -> None:
    with pytest.raises(ValueError, match="are 3 chunks, but 1 digests"):
        Artefact("x", "0" * 64, 10_000, 4096, ("0" * 64,))
    assert len(WEIGHTS.chunks) == 3


def test_content_is_what_runs_and_digest_is_all_of_it() -> None:
    gentle = plan(soak=Soak(5.0))
    assert gentle.content == plan().content != plan("3").content
    assert gentle.digest != plan().digest
    assert plan(probe=Probe(golden=MANIFEST)).size_bytes == MANIFEST.size_bytes + WEIGHTS.size_bytes


def test_a_document_is_believed_when_one_trusted_key_has_signed_it() -> None:
    message = sign_document(document(), [STRANGER, OLD])
    desired, raw = verify_document(message, keys(OLD, NEW))
    assert desired == document()
    assert raw == encode_desired(document())


def test_an_untrusted_signer_is_distinguished_from_a_broken_signature() -> None:
    message = sign_document(document(), [STRANGER])
    with pytest.raises(SignatureRefused, match=f"signed by {id_of(STRANGER)}, and none"):
        verify_document(message, keys(OLD))
    with pytest.raises(SignatureRefused, match="trusts no key"):
        verify_document(message, {})
    forged = sign_document(document(), [OLD]).replace(b'"rev":1', b'"rev":2')
    with pytest.raises(SignatureRefused, match=f"signature of the key {id_of(OLD)} is wrong"):
        verify_document(forged, keys(OLD))


def test_keys_change_hands_only_with_the_signatures_of_both() -> None:
    handover = document(keys=(public_text(NEW.public_key().public_bytes_raw()),))
    with pytest.raises(SignatureRefused, match=f"the new key {id_of(NEW)}, which has not signed"):
        verify_document(sign_document(handover, [OLD]), keys(OLD))
    with pytest.raises(SignatureRefused, match="none of these keys"):
        verify_document(sign_document(handover, [NEW]), keys(OLD))
    accepted, _ = verify_document(sign_document(handover, [OLD, NEW]), keys(OLD))
    assert keys_after(accepted, keys(OLD)) == keys(NEW)
    assert keys_after(document(), keys(OLD)) == keys(OLD)


def test_unknown_keys_of_a_newer_gateway_are_ignored() -> None:
    raw = msgspec.json.decode(encode_desired(document()))
    raw["novelty"] = {"a": 1}
    assert decode_desired(msgspec.json.encode(raw, order="sorted")) == document()


def test_the_devices_own_document_overrides_its_groups_and_the_first_group_the_others() -> None:
    first = DesiredDocument(7, 0, group="a", models={"digits": plan("3"), "text": plan("4")}, remove=("gone",))
    second = DesiredDocument(9, 0, group="b", models={"text": plan("5"), "gone": plan("1"), "more": plan("6")})
    own = document(models={"digits": plan("2")}, remove=("more",))
    found = desired_models(own, [first, second])
    assert {name: (wish.plan.version if wish.plan else None, wish.scope) for name, wish in found.items()} == {
        "digits": ("2", "device/kiosk-1"),
        "more": (None, "device/kiosk-1"),
        "text": ("4", "group/a"),
        "gone": (None, "group/a"),
    }


@pytest.mark.parametrize(
    ("window", "clock", "expected"),
    [
        ("", "12:00", True), ("02:00-05:00", "02:00", True), ("02:00-05:00", "05:00", False),
        ("22:00-04:30", "23:59", True), ("22:00-04:30", "04:29", True), ("22:00-04:30", "12:00", False),
    ],
)  # fmt: skip
def test_a_window_is_of_the_utc_day_and_may_pass_midnight(window: str, clock: str, expected: bool) -> None:
    hours, minutes = map(int, clock.split(":"))
    assert in_window(window, 86_400.0 * 20_000 + 3600 * hours + 60 * minutes) is expected


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("tidegate/v1/f1/down/kiosk-1/desired", "device/kiosk-1"), ("tidegate/v1/f1/down/g/a/desired", "group/a"),
        ("tidegate/v1/f1/down/g/desired", "device/g"), ("tidegate/v1/f1/down/x/a/desired", None),
        ("tidegate/v1/f1/down/kiosk-1/cmd", None), ("tidegate/v1/f2/down/kiosk-1/desired", None), ("desired", None),
    ],
)  # fmt: skip
def test_the_scope_of_a_document_is_in_its_topic(topic: str, expected: str | None) -> None:
    assert Topics("f1").parse_desired(topic) == expected


def test_a_report_outlives_its_session_and_only_moves_forward() -> None:
    fleet, device = register(), Device()
    old = device.reported(1.0, ModelReport("digits", RolloutState.DOWNLOADING))
    new = device.reported(2.0, ModelReport("digits", RolloutState.COMMITTED))
    for topic, payload in (device.birth(0.0), new, old, replace_epoch(device)):
        fleet.fold(topic, payload, 3.0)
    (view,) = fleet.devices(3.0)
    assert view.epoch == 101
    assert view.reported is not None
    assert view.reported.models == (ModelReport("digits", RolloutState.COMMITTED),)


def replace_epoch(device: Device) -> tuple[str, bytes]:
    device.epoch += 1
    return device.birth(3.0)


EXPECTED = {"y": np.array([[0.1, 0.9], [0.8, 0.2]], np.float32)}


@pytest.mark.parametrize(
    ("probe", "answer", "words"),
    [
        (Probe(), [[9, 8], [7, 6]], ""),
        (Probe(atol=0.05), [[0.12, 0.9], [0.8, 0.2]], ""),
        (Probe(atol=0.01), [[0.12, 0.9], [0.8, 0.2]], "off by 0.02"),
        (Probe(cosine_min=0.99), [[0.9, 0.1], [0.8, 0.2]], "cosine"),
        (Probe(top1_min=0.6), [[0.9, 0.1], [0.8, 0.2]], "top-1 agreement 0.5000 of 2 rows"),
        (Probe(top1_min=0.5), [[0.9, 0.1], [0.8, 0.2]], ""),
        (Probe(), [[np.nan, 8], [7, 6]], "NaN in other places"),
        (Probe(), [[1.0, 8]], "of shape"),
    ],
)
def test_answers_are_near_enough_or_it_says_what_is_not(probe: Probe, answer: Any, words: str) -> None:
    got = inaccuracy(probe, [EXPECTED], [{"y": np.array(answer, np.float32)}])
    assert words in got
    assert bool(words) == bool(got)


def test_golden_cases_come_back_and_damaged_ones_are_refused() -> None:
    raw = encode_golden([({"x": np.ones((1, 3), np.float32)}, EXPECTED)], {"x": Datatype.FP32, "y": Datatype.FP32})
    ((inputs, outputs),) = decode_golden(raw)
    assert np.array_equal(inputs["x"], np.ones((1, 3)))
    assert np.array_equal(outputs["y"], EXPECTED["y"])
    for damaged in (raw[:-1], b"", b"\xc1", raw.replace(b"FP32", b"FP64")):
        with pytest.raises(BadGolden):
            decode_golden(damaged)


def test_a_plan_without_its_manifest_or_with_a_path_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no model\.yaml"):
        replace(plan(), manifest="0" * 64)
    with pytest.raises(ValueError, match="twice"):
        ModelPlan("2", MANIFEST.sha256, (MANIFEST, MANIFEST))
