import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.errors import InputError
from plimsoll.records.run import EndLine
from plimsoll.records.watch import Line
from plimsoll.run.directory import RunDirectory
from plimsoll.run.watch import Forecast, Watch, watch_of

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
        forecast.seconds_left(float(second), Line(kind="machine", name="x", used_bytes=used, limit_bytes=limit_bytes))
        for second, used in enumerate(uses)
    ]


def test_growth_that_reaches_the_limit_is_said_from_the_eighth_sample_on():
    assert _told(range(500, 600, 10)) == [None] * 7 + [43.0, 42.0, 41.0]


def test_level_falling_and_far_use_do_not_warn():
    for uses in ([900] * 30, range(990, 700, -10), range(500, 520), range(0, 300, 10)):
        assert set(_told(uses)) == {None}


def test_growth_up_to_what_a_plan_predicts_does_not_warn():
    forecast = Forecast()
    lines = [
        Line(kind="budget", name="x", used_bytes=used, limit_bytes=1000, expected_bytes=700)
        for used in range(500, 760, 10)
    ]
    told = [forecast.seconds_left(float(second), line) for second, line in enumerate(lines)]
    assert told[:21] == [None] * 21
    assert told[21] == (1000 - 710) / 10


def test_one_jump_does_not_warn():
    assert set(_told([600] * 10 + [900] * 3)) == {None}


def test_a_warning_holds_until_the_limit_is_twice_as_far():
    fast, slow, slower = range(520, 600, 8), range(600, 720, 4), range(720, 750, 1)
    assert _told([*fast, *slow])[-1] == (1000 - 716) / 4  # 71 s: it stays, but would not begin
    assert _told(slow)[-1] is None
    assert _told([*fast, *slow, *slower])[-1] is None  # 251 s


def test_a_warning_ends_where_no_more_is_used_than_a_plan_predicts():
    """After it 71 s are no reason to begin, and would hold a warning that was not over."""
    forecast = Forecast()
    uses = [(used, None) for used in range(520, 600, 8)] + [(used, 710) for used in range(600, 712, 4)] + [(716, None)]
    told = [
        forecast.seconds_left(
            float(second), Line(kind="budget", name="x", used_bytes=used, limit_bytes=1000, expected_bytes=expected)
        )
        for second, (used, expected) in enumerate(uses)
    ]
    assert told[9] == (1000 - 592) / 8
    assert told[10:] == [None] * 29


def _samples(pid, every_seconds, num_samples=None):
    with Watch(pid) as watch:
        return list(watch.samples(every_seconds, num_samples)), watch.end()


def test_a_real_process_is_warned_of_before_it_runs_out():
    with subprocess.Popen([sys.executable, "-c", GROW]) as process:
        samples, end = _samples(process.pid, 0.25)
    name = f"RLIMIT_DATA of {process.pid}"
    lines = [line for sample in samples for line in sample.lines if line.name == name]
    warned = [line for line in lines if line.seconds_left is not None]
    assert warned
    assert warned[0].used_bytes < 0.9 * warned[0].limit_bytes
    assert (end.how, end.exit_code) == ("ended", 0)


def test_so_many_samples_and_a_process_that_is_not_there():
    samples, end = _samples(os.getpid(), 0.01, 3)
    assert (len(samples), end.how) == (3, "stopped")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(InputError, match="no running process"):
        Watch(process.pid)


def test_a_process_that_was_killed_ends_the_watch_at_once_and_is_called_killed():
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process,
        Watch(process.pid) as watch,
    ):
        found = watch.samples(50.0, None)
        next(found)
        process.kill()
        assert list(found) == []
        end = watch.end()
    assert (end.how, end.exit_code) == ("killed", -signal.SIGKILL)
    assert end.seconds < 50
    assert "SIGKILL" in end.text


def test_the_machine_is_watched_without_a_process():
    with Watch(num_processes=3) as watch:
        (sample,) = watch.samples(1.0, 1)
        assert watch.head().subject == "this machine"
        assert watch.end().how == "stopped"
    sizes = [use.private_bytes for use in sample.processes]
    assert 1 <= len(sizes) <= 3
    assert sizes == sorted(sizes, reverse=True)
    assert sample.lines[0].kind == "machine"


def test_a_folder_without_a_run_and_a_run_that_is_over_are_said(tmp_path):
    with pytest.raises(InputError, match=r"no metrics\.jsonl"):
        watch_of(tmp_path, None)
    directory = RunDirectory.create(tmp_path / "run", force=False)
    with pytest.raises(InputError, match="no process of the run"):
        watch_of(directory.path, None)
    directory.append(EndLine(time_seconds=1.0, step=0, status="failed"))
    with pytest.raises(InputError, match=r"is over \(failed at step 0\)"):
        watch_of(directory.path, None)


def test_the_command_of_a_run_is_found_by_its_claim(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", force=False)
    with directory.claimed(), watch_of(directory.path, None) as watch:
        (sample,) = watch.samples(1.0, 1)
        assert watch.head().subject == "run run"
    assert sample.processes[0].pid == os.getpid()
    assert sample.run.status == "preparing"


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def group():
    """A control group of 96 MiB, where this machine lets one be made."""
    folder = GROUPS / f"plimsoll-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here ({error.strerror})")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(96 << 20))
        yield folder
    finally:
        folder.rmdir()


def test_the_group_of_the_watched_process_counts_and_its_kill_is_out_of_memory(group):
    code = "import sys; sys.stdin.readline(); held = []\nwhile True: held.append(bytearray(b'x' * (4 << 20)))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, text=True) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        with Watch(process.pid) as watch:
            found = watch.samples(30.0, None)
            lines = [line for line in next(found).lines if line.kind == "cgroup"]
            process.stdin.write("\n")
            process.stdin.flush()
            assert list(found) == []
            end = watch.end()
    assert [(line.limit_bytes, group.name in line.name) for line in lines] == [(96 << 20, True)]
    assert end.how == "out_of_memory"
    assert "its control group counts it" in end.text


def test_a_signal_without_a_name_is_told_by_its_number():
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process,
        Watch(process.pid) as watch,
    ):
        process.send_signal(signal.SIGRTMIN + 1)
        process.wait()
        end = watch.end()
    assert end.how in {"killed", "gone"}  # known from Linux 6.15 on
    assert end.how == "gone" or f"signal {signal.SIGRTMIN + 1}" in end.text
