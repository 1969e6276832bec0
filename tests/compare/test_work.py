"""How actions spend their seconds."""

import time

from rrfp.compare.work import LATE, Multiply, Sleep


def test_sleeping_lasts_at_least_what_was_asked_for():
    work, start = Sleep(), time.monotonic()
    work.spend(0.01)
    assert time.monotonic() - start >= 0.01
    work.spend(-1.0)  # nothing left to spend


def test_a_sleep_that_ends_late_is_counted(monkeypatch):
    now = [0.0]
    late = [0.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])

        @staticmethod
        def sleep(seconds):
            now[0] += seconds + late[0]

    monkeypatch.setattr("rrfp.compare.work.time", Clock)
    work = Sleep()
    for late[0] in (0.0, LATE / 2, LATE * 2, LATE * 50):
        work.spend(0.02)
    assert work.overruns == 2


def test_real_compute_is_as_many_products_as_fill_the_time(monkeypatch):
    done = []
    monkeypatch.setattr(Multiply, "_multiply", lambda self, count: done.append(count))
    work = Multiply(per_second=10_000.0)
    work.spend(0.02)
    work.spend(0.0)
    assert done == [200, 0] and not work.emulated and Sleep.emulated


def test_calibration_finds_a_rate():
    assert Multiply.calibrated(seconds=0.02)._per_second > 1000, "a product of 64 x 64 takes more than a millisecond"
