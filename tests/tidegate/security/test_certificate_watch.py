"""A process that runs for months says in time that its certificate ends, though nobody connects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.support.certificates import FleetPki
from tidegate import clock
from tidegate.metrics.certificate_families import certificate_families
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.certificate_watch import CertificateWatch
from tidegate.security.tls import Tls, tls_of

EDGE = CertificateIdentity("edge", "edge-1")
DAY_S = 86_400.0


class Time:
    """Both clocks, which go on together."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passed_s = 0.0
        utc_s, now = clock.utc_s(), clock.now()
        patch.setattr(clock, "utc_s", lambda: utc_s + self.passed_s)
        patch.setattr(clock, "now", lambda: now + self.passed_s)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def tls_in(folder: Path) -> tuple[FleetPki, Tls]:
    pki = FleetPki(folder / "pki")
    tls = tls_of(pki.config(str(EDGE)), lambda: EDGE)
    assert tls is not None
    return pki, tls


def said(watch: CertificateWatch) -> list[str]:
    with capture_logs() as logs:
        watch.look()
    return [one["event"].partition(":")[0] for one in logs]


def test_a_certificate_that_is_due_and_one_that_has_ended_are_said_once_a_day(tmp_path: Path, time: Time) -> None:
    pki, tls = tls_in(tmp_path)  # for 30 days
    watch = CertificateWatch(tls)
    assert said(watch) == []
    time.passed_s = 21 * DAY_S
    assert said(watch) == ["this process's certificate is due"]
    time.passed_s += DAY_S / 2
    assert said(watch) == []
    time.passed_s += DAY_S / 2
    assert said(watch) == ["this process's certificate is due"]
    time.passed_s = 30 * DAY_S + 60.0
    assert said(watch) == ["this process's certificate is expired"]
    pki.store.issue(EDGE, (), days=30, now=datetime.fromtimestamp(clock.utc_s(), UTC))
    tls.fresh()
    assert said(watch) == []


def test_prometheus_is_told_when_the_certificate_in_use_begins_and_ends(tmp_path: Path) -> None:
    _, tls = tls_in(tmp_path)
    found = {
        one.name: sample.value
        for one in certificate_families(CertificateWatch(tls).validity_utc_s())
        for sample in one.samples
    }
    left_s = found["tidegate_certificate_not_after_timestamp_seconds"] - clock.utc_s()
    assert left_s == pytest.approx(timedelta(days=30).total_seconds(), abs=60)
    assert found["tidegate_certificate_not_before_timestamp_seconds"] <= clock.utc_s()
    assert list(certificate_families(CertificateWatch(None).validity_utc_s())) == []


async def test_files_that_cannot_be_used_are_told_of_before_anybody_connects(tmp_path: Path) -> None:
    _, tls = tls_in(tmp_path)
    tls.config.key.write_bytes(b"junk")
    with capture_logs() as logs:
        async with CertificateWatch(tls), CertificateWatch(None):
            await clock.sleep(0.01)
    assert ["cannot be used" in one["event"] for one in logs] == [True]
