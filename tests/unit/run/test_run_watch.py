import os
import subprocess
import sys

import pytest

from plimsoll.errors import InputError
from plimsoll.records.watch import Line
from plimsoll.run.watch import Forecast, watch

GROW = """
import resource, time
resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, 256 << 20))
held = []
try:
    while True:
        held.append(bytearray(b"x" * (4 << 20))); time.sleep(0.1)
except MemoryError:
    pass
"""


def _told(uses, limit_bytes=1000):
    forecast = Forecast()
    return [
        forecast.seconds_left(float(second), Line(name="x", used_bytes=used, limit_bytes=limit_bytes))
        for second, used in enumerate(uses)
    ]


def test_growth_that_reaches_the_limit_is_said_from_the_eighth_sample_on():
    assert _told(range(500, 600, 10)) == [None] * 7 + [43.0, 42.0, 41.0]


def test_level_falling_and_far_use_do_not_warn():
    for uses in ([900] * 30, range(990, 700, -10), range(500, 520), range(0, 300, 10)):
        assert set(_told(uses)) == {None}


def test_one_jump_does_not_warn():
    assert set(_told([600] * 10 + [900] * 3)) == {None}


def test_a_warning_holds_until_the_limit_is_twice_as_far():
    fast, slow, slower = range(520, 600, 8), range(600, 720, 4), range(720, 750, 1)
    assert _told([*fast, *slow])[-1] == (1000 - 716) / 4  # 71 s: it stays, but would not begin
    assert _told(slow)[-1] is None
    assert _told([*fast, *slow, *slower])[-1] is None  # 251 s


def test_a_real_process_is_warned_of_before_it_runs_out():
    with subprocess.Popen([sys.executable, "-c", GROW]) as process:
        samples = list(watch(process.pid, 0.25, None))
    name = f"RLIMIT_DATA of {process.pid}"
    lines = [line for sample in samples for line in sample.lines if line.name == name]
    warned = [line for line in lines if line.seconds_left is not None]
    assert warned
    assert warned[0].used_bytes < 0.9 * warned[0].limit_bytes


def test_so_many_samples_and_a_process_that_is_not_there():
    assert len(list(watch(os.getpid(), 0.01, 3))) == 3
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(InputError, match="no running process"):
        next(watch(process.pid, 0.01, 1))
