"""Guides in which a reader starts single processes are followed to the letter."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.guides.guide import Guide, serving
from tests.e2e.guides.reader import NEEDS_A_NETWORK, ROOT, Reader
from tests.support.gateway.text_gateway import text_repository
from tests.support.models.talking import talker_repository

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(600),  # many programs start one after another, on a machine that may be busy
    pytest.mark.needs_mosquitto,
    NEEDS_A_NETWORK,
]

KIOSK = """
name: kiosk-7
mqtt: mqtt://127.0.0.1:8004
fleet: site
model_repository: models
rollout: {keys: [operator.pub], groups: [kiosks]}
"""


def test_models_come_and_go_as_the_page_says(reader: Reader) -> None:
    with Guide(reader, "docs/loading-models.md") as guide:
        guide.until("tidegate model index", r"digits +\d+ +READY")
        guide.until("tidegate model load", "minilm")
        guide.until("tidegate model unload", "digits")


def test_targets_are_found_as_the_page_says(reader: Reader) -> None:
    shutil.rmtree(reader.folder / "models" / "minilm")
    reader.start("tidegate pool")
    with Guide(reader, "docs/discovery.md") as guide:
        guide.until("tidegate status", r"pool/main\W+ready")
        guide.until("tidegate status", r"pool/main\W.*drain")
        guide.until("tidegate status", r"pool/main\W+ready")  # by DNS
        guide.until("tidegate status", r"pool/main\W+ready")  # by Kubernetes
        guide.until("tidegate status", r"pool/main\W.*drain")
        reader.stop("tidegate pool")
        guide.until("tidegate status", r"pool/main\W+ready")  # one that announces itself
        guide.until("tidegate status", r"(?s)\A(?!.*pool/main)")


def test_a_pool_generates_as_the_page_says(reader: Reader) -> None:
    shutil.rmtree(reader.folder / "models")
    talker_repository(reader.folder / "models")
    with Guide(reader, "docs/generating-models.md") as guide:
        guide.until("import numpy", "length")


def test_callers_ask_for_text_as_the_page_says(reader: Reader) -> None:
    """The language model is a paced one with a real tokenizer, since a real one would take minutes to make."""
    shutil.rmtree(reader.folder / "models")
    text_repository(reader.folder, name="smollm2")
    short = {"--seconds 120 --seeds 4": "--seconds 2 --seeds 1"}
    with (
        serving(reader, "tidegate up --models models --edges 1"),
        Guide(reader, "docs/generation.md", with_options=short) as guide,
    ):
        guide.until("curl", "(?s)data: .*data: .DONE.")
        guide.until("from openai", r"\A(edge|pool)/\S+\n.*\w")
        guide.until("import numpy", r"\[b'")
        guide.until("tidegate simulate", "value-handover")


def test_a_running_fleet_is_asked_and_configured_as_pages_say(reader: Reader) -> None:
    (reader.folder / "models" / "minilm").rename(reader.folder / "minilm")
    (reader.folder / "edge.yaml").write_text(KIOSK)
    up = "tidegate up --ship operator.pub --edges 1 --demo digits"
    soon = {"--key operator.key": "--watch 1s --waves 100%"}
    with (
        serving(reader, "tidegate keys signing create operator", up),
        serving(reader, "tidegate edge --config edge.yaml"),
    ):
        with Guide(reader, "docs/degradation.md") as guide:
            guide.until("curl", '"conditions"')
            guide.until("curl", '"pool_replicas_needed"')
        with Guide(reader, "docs/configuring-devices.md", with_options=soon) as guide:
            guide.save("device.yaml")
            guide.until("tidegate fleet configure", "max_queue_size")
            guide.until("tidegate fleet configure", "kiosk-7")
            guide.until("tidegate fleet configuration", r"kiosk-7\W+fresh\W+in sync")
        with Guide(reader, "docs/edge-device.md") as guide:
            guide.until("tidegate edge doctor", r"(?s)ok +models: whole.*ok +gateways: served now: gateway/")


def test_a_configuration_is_shown_and_checked_as_the_page_says(reader: Reader) -> None:
    (reader.folder / "device.yaml").write_text("name: kiosk-7\nmodel_repository: models\n")
    with Guide(reader, "docs/configuration.md") as guide:
        guide.until("tidegate config example", "name:")
        guide.until("tidegate config schema", '"properties"')
        guide.until("tidegate config check", "device.yaml")


def test_a_container_is_asked_for_its_health_as_the_page_says(reader: Reader) -> None:
    shutil.rmtree(reader.folder / "models" / "minilm")
    reader.run("tidegate pki init && tidegate pki issue pool/cloud --host localhost")
    config = (ROOT / "deploy/config/cloud.yaml").read_text().replace("/var/lib/tidegate/models", "models")
    for installed, made in (("tls.crt", "pool/cloud.crt"), ("tls.key", "pool/cloud.key"), ("ca.crt", "ca.crt")):
        config = config.replace(f"/etc/tidegate/pki/{installed}", f"pki/{made}")
    (reader.folder / "deploy" / "config").mkdir(parents=True)
    (reader.folder / "deploy" / "config" / "cloud.yaml").write_text(config)
    with Guide(reader, "docs/containers.md") as guide:
        guide.until("tidegate health", "")
