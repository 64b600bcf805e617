"""Worker health tells signs of decay from normal variation."""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf
from random import Random

import pytest

from cloud_pool.core.health.worker_health import (
    BASELINE,
    CHECK_S,
    BatchTime,
    DriftDetector,
    HealthLimits,
    Vitals,
    WorkerHealth,
    common_excess,
)
from tidegate.estimate.trend import TREND_LEAST

MB = 1e6
WELL = Vitals(CHECK_S, busy_s=6.0, cpu_s=6.0, threads=1, rss_bytes=200 * MB, batches=[BatchTime(0.01, 0.01)] * 5)


def noise(seed: int, *, sigma: float = 0.15, correlation: float = 0.5) -> list[float]:
    """A week of checks on a busy machine: correlated, with tails."""
    random, x, samples = Random(seed), 0.0, []
    for _ in range(7 * 8640):
        shock = random.gauss(0.0, 3.0 if random.random() < 0.05 else 1.0)
        x = correlation * x + math.sqrt(1.0 - correlation**2) * shock
        samples.append(sigma * x)
    return samples


def slower(vitals: Vitals, times: float) -> Vitals:
    return replace(vitals, batches=[one._replace(took_s=one.took_s * times) for one in vitals.batches])


def health(limits: HealthLimits | None = None) -> WorkerHealth:
    return WorkerHealth(limits or HealthLimits(), warm_rss_bytes=200 * MB)


def checks(subject: WorkerHealth, vitals: Vitals, count: int, *, common: float = 0.0) -> str | None:
    for _ in range(count):
        subject.check(vitals, common=common)
    return subject.complaint


class TestDrift:
    def test_a_worker_that_becomes_half_as_fast_again_is_told_within_sixty_checks(self) -> None:
        for seed in range(20):
            drift, random = DriftDetector(10.0), Random(seed)
            for _ in range(400):
                drift.record(random.gauss(0.0, 0.15), 0.0)
            assert not drift.alarms
            took = 0
            while not drift.alarms:
                drift.record(random.gauss(math.log(1.5), 0.15), 0.0)
                took += 1
            assert took <= 25

    @pytest.mark.slow
    def test_a_week_of_a_busy_machines_noise_is_about_one_alarm_at_most(self) -> None:
        alarms = 0
        for seed in range(4):
            drift = DriftDetector(10.0)
            for sample in noise(seed):
                drift.record(sample, 0.0)
                if drift.alarms:
                    alarms, drift = alarms + 1, DriftDetector(10.0)
        assert alarms <= 4

    def test_nothing_is_said_before_the_normal_is_known(self) -> None:
        subject = health()
        assert checks(subject, slower(WELL, 5.0), BASELINE) is None
        assert subject.drift.excess is None or abs(subject.drift.excess) < 1e-9

    def test_what_it_was_from_the_start_is_its_normal(self) -> None:
        assert checks(health(), slower(WELL, 3.0), 200) is None

    def test_what_slows_all_is_no_workers_fault(self) -> None:
        subjects = [health(), health()]
        for subject in subjects:
            checks(subject, WELL, 100)
        for _ in range(60):
            common = [common_excess([other for other in subjects if other is not one]) for one in subjects]
            for one, shift in zip(subjects, common, strict=True):
                one.check(slower(WELL, 1.8), common=shift)
        assert [one.complaint for one in subjects] == [None, None]

    def test_who_alone_becomes_slow_is_told_beside_its_peer(self) -> None:
        slow, well = health(), health()
        for subject in (slow, well):
            checks(subject, WELL, 100)
        for _ in range(40):
            shift = common_excess([slow]), common_excess([well])
            well.check(WELL, common=shift[0])
            slow.check(slower(WELL, 1.8), common=shift[1])
        assert slow.complaint is not None and slow.complaint.startswith("drift: ")
        assert well.complaint is None
        assert "drift" in repr(slow) and "well" in repr(well)

    @pytest.mark.slow
    def test_a_slow_decay_over_hours_does_not_become_the_normal(self) -> None:
        subject = health()
        checks(subject, WELL, 400)
        for n in range(3000):
            subject.check(slower(WELL, math.exp(0.6 * n / 3000)))
        assert subject.complaint is not None and subject.complaint.startswith("drift: ")

    def test_who_computes_nothing_is_not_judged_by_it(self) -> None:
        assert checks(health(), replace(WELL, batches=()), 500) is None

    def test_nobodys_peers_are_off_by_nothing(self) -> None:
        assert common_excess([]) == common_excess([health()]) == 0.0


class TestMemory:
    def test_half_again_of_what_it_was_when_warm_is_too_much_if_it_stays(self) -> None:
        subject = health()
        grown = replace(WELL, rss_bytes=310 * MB)
        assert checks(subject, grown, 2) is None
        assert checks(subject, grown, 1) == "memory: 310 MB, warm it had 200"

    def test_one_peak_is_forgiven(self) -> None:
        subject = health()
        for _ in range(10):
            checks(subject, replace(WELL, rss_bytes=400 * MB), 1)
            assert checks(subject, WELL, 5) is None

    def test_a_leak_is_told_when_the_limit_is_hours_away(self) -> None:
        subject, minutes = health(), 0
        while subject.complaint is None:
            minutes += 1
            vitals = replace(WELL, rss_bytes=(200 + 0.5 * minutes) * MB, memory_limit_bytes=300 * MB)
            checks(subject, vitals, int(60 / CHECK_S))
        assert subject.complaint.startswith("leak: memory is full in 3.")
        assert minutes <= TREND_LEAST + 1

    @pytest.mark.slow
    def test_the_same_leak_with_days_to_go_is_not(self) -> None:
        subject = health()
        for minute in range(200):
            checks(subject, replace(WELL, rss_bytes=(200 + 0.3 * minute) * MB, memory_limit_bytes=5e9), 6)
        assert subject.complaint is None

    @pytest.mark.slow
    def test_memory_that_goes_up_and_down_or_stands_still_does_not_leak(self) -> None:
        for wave in (0.0, 40.0):
            subject, random = health(), Random(5)
            for _ in range(120):
                rss = (200 + wave * random.random()) * MB
                checks(subject, replace(WELL, rss_bytes=rss, memory_limit_bytes=260 * MB), 6)
            assert subject.complaint is None


class TestLatencyAndCpu:
    def test_a_p99_over_the_limit_is_told(self) -> None:
        subject = health(HealthLimits(p99_s=0.05))
        few_slow = replace(WELL, batches=[BatchTime(0.01, 0.01)] * 48 + [BatchTime(0.01, 0.09)] * 2)
        assert checks(subject, few_slow, 2) is None
        assert checks(subject, few_slow, 3) == "p99: 0.09 s, limit 0.05 s"

    def test_without_a_limit_it_is_not_looked_at(self) -> None:
        slow = replace(WELL, batches=[BatchTime(9.0, 9.0, limit_s=1.0)] * 50)
        assert checks(health(HealthLimits(p99_s=inf)), slow, 20) is None

    def test_where_no_limit_is_named_each_batch_is_held_to_its_models_own(self) -> None:
        two_models = [BatchTime(0.01, 0.4, limit_s=1.0)] * 48 + [BatchTime(0.01, 0.4, limit_s=0.1)] * 2
        assert checks(health(), replace(WELL, batches=two_models), 5) == "p99: 0.4 s, limit 0.1 s"

    def test_a_limit_of_the_models_own_is_lengthened_by_what_slows_all_workers(self) -> None:
        slow = replace(WELL, batches=[BatchTime(0.01, 0.15, limit_s=0.1)] * 50)
        assert checks(health(), slow, 20, common=math.log(2.0)) is None

    def test_a_p99_of_a_few_batches_is_none(self) -> None:
        subject = health(HealthLimits(p99_s=0.001))
        assert checks(subject, WELL, 10) is None
        assert subject.p99 == (0.0, 0.0)

    def test_busy_cores_without_work_are_told_and_with_work_are_what_they_are_for(self) -> None:
        spinning = replace(WELL, cpu_s=9.9, busy_s=1.0)
        assert checks(health(), spinning, 3) == "cpu: 99% of its cores without work"
        assert checks(health(), replace(WELL, cpu_s=9.9, busy_s=9.9), 20) is None
        assert checks(health(), replace(spinning, threads=4), 20) is None

    def test_a_sign_must_show_again_within_the_window(self) -> None:
        subject = health()
        for _ in range(20):
            checks(subject, replace(WELL, cpu_s=9.9, busy_s=1.0), 2)
            assert checks(subject, WELL, 5) is None
