import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from plimsoll.device.cpu.cgroup import OomKills
from plimsoll.diagnose.watch import Forecast, Watch, watch_of
from plimsoll.errors import InputError
from plimsoll.records.run import EndLine, StartLine
from plimsoll.records.watch import Line
from plimsoll.training.run_directory import RunDirectory

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


@pytest.mark.parametrize(("limit_bytes", "left"), [(5670, 60.0), (5671, None)])
def test_a_warning_begins_a_minute_before_the_limit(limit_bytes, left):
    assert _told(range(5000, 5080, 10), limit_bytes) == [None] * 7 + [left]


@pytest.mark.parametrize(("limit_bytes", "left"), [(5080 + 1200, 120.0), (5080 + 1201, None)])
def test_a_warning_ends_where_the_limit_is_raised_to_more_than_two_minutes(limit_bytes, left):
    forecast = Forecast()
    told = [
        forecast.seconds_left(float(second), Line(kind="machine", name="x", used_bytes=used, limit_bytes=limit))
        for second, (used, limit) in enumerate([(used, 5670) for used in range(5000, 5080, 10)] + [(5080, limit_bytes)])
    ]
    assert told[7:] == [60.0, left]


def test_only_the_last_thirty_samples_count():
    """In a square function the slope between two samples is their sum, so the median equals first plus last."""
    told = _told([1000 + second * second for second in range(41)], limit_bytes=3000)
    assert told[40] == (3000 - 2600) / (11 + 40)


@pytest.mark.parametrize(("limit_bytes", "left"), [(840, 420 / 60), (841, None)])
def test_less_than_half_of_a_limit_is_no_reason_to_warn(limit_bytes, left):
    assert _told(range(0, 480, 60), limit_bytes)[-1] == left


def test_where_the_limit_is_passed_no_time_is_left():
    assert _told(range(900, 1060, 10))[7:] == [3.0, 2.0, 1.0] + [0.0] * 6


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
    assert _told([*fast, *slow])[-1] == (1000 - 716) / 4  # 71 s: the warning stays, but would not start
    assert _told(slow)[-1] is None
    assert _told([*fast, *slow, *slower])[-1] is None  # 251 s


def test_a_warning_ends_where_no_more_is_used_than_a_plan_predicts():
    """Afterwards 71 s do not start a warning, and would only continue an active one."""
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


@pytest.mark.long
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
        (sample,) = watch.samples(1000.0, 1)  # no wait after the last sample
        assert len(list(watch.samples(0.01, 2))) == 2
        assert watch.head().subject == "this machine"
        assert watch.end().how == "stopped"
    sizes = [use.private_bytes for use in sample.processes]
    assert 1 <= len(sizes) <= 3
    assert sizes == sorted(sizes, reverse=True)
    assert sample.lines[0].kind == "machine"


def test_of_a_machine_the_ten_largest_processes_are_shown():
    with ExitStack() as stack:
        for _ in range(11):
            stack.callback(stack.enter_context(subprocess.Popen(["sleep", "60"])).kill)
        with Watch() as watch:
            (sample,) = watch.samples(0.0, 1)
    assert len(sample.processes) == 10


def test_seconds_are_counted_from_the_begin_of_the_watch(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Watch(os.getpid()) as watch:
        now[0] += 2.34567
        (sample,) = watch.samples(0.0, 1)
        now[0] += 1.0
        assert (sample.seconds, watch.end().seconds) == (2.346, 3.346)
        assert watch.head().subject == f"process {os.getpid()}"


class Counter:
    """A stub of the kernel's counters: calling its OOM killer would end more than this test."""

    def __init__(self, *readings):
        self.readings = readings
        self.num_read = 0

    def read(self):
        self.num_read += 1
        return self.readings[min(self.num_read, len(self.readings)) - 1]


OURS, MACHINE = partial(OomKills, is_whole_machine=False), partial(OomKills, is_whole_machine=True)


@pytest.mark.parametrize(
    ("before", "now", "num_kills", "counted_by"),
    [
        (OURS(4), OURS(9), 5, "its control group"),
        (MACHINE(4), MACHINE(9), 5, "the machine"),
        (OURS(4), OURS(4), 0, None),
        (MACHINE(4), MACHINE(4), 0, None),
        (None, OURS(9), None, None),
        (OURS(4), None, None, None),
        (OURS(4), MACHINE(9), None, None),  # the group was deleted with its last process
        (MACHINE(4), OURS(9), None, None),
    ],
)
def test_a_kill_is_for_memory_where_the_kernel_counts_one(monkeypatch, before, now, num_kills, counted_by):
    monkeypatch.setattr("plimsoll.diagnose.watch.KillCounter", lambda pid: Counter(before, now))
    with subprocess.Popen(["sleep", "60"]) as process, Watch(process.pid) as watch:
        (sample,) = watch.samples(0.0, 1)
        process.kill()
        process.wait()
        end = watch.end()
    assert sample.num_kills == num_kills
    if end.how != "gone":  # its exit code is readable since Linux 6.15
        assert end.how == ("out_of_memory" if num_kills else "killed")
        assert end.exit_code == -signal.SIGKILL
        assert counted_by is None or f"(counted by {counted_by})" in end.text


def _ended(code, run=None):
    """Return the end of a watched process that has exited with `code` and was not waited for."""
    command = [sys.executable, "-c", f"import sys; sys.stdin.read(); sys.exit({code})"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process, Watch(process.pid, run) as watch:
        process.stdin.close()
        assert watch._watched.wait(60.0)
        return watch.end()


@pytest.mark.parametrize(("code", "how"), [(0, "ended"), (1, "ended"), (3, "out_of_memory")])
def test_a_run_says_by_its_exit_code_that_memory_ran_out(tmp_path, code, how):
    directory = RunDirectory.create(tmp_path / "run", force=False)
    directory.append(StartLine(time_seconds=0, step=1234, micro_batch=8, baseline_bytes=1, wall_time="2026-11-24"))
    directory.append(EndLine(time_seconds=1.0, step=1234, status="failed", message="it broke"))
    end = _ended(code, directory)
    assert (end.how, end.exit_code) == (how, code)
    assert end.text.endswith(f"ended with exit code {code}; the run is failed at step 1,234: it broke")


@pytest.mark.parametrize("code", [0, 3])
def test_of_other_processes_an_exit_code_says_nothing_about_memory(code):
    end = _ended(code)
    assert (end.how, end.exit_code) == ("ended", code)
    assert end.text.endswith(f"ended with exit code {code}")


def test_a_run_that_ends_without_a_word_is_not_finished(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", force=False)
    directory.append(StartLine(time_seconds=0, step=7, micro_batch=8, baseline_bytes=1, wall_time="2026-11-24"))
    assert _ended(1, directory).text.endswith("; the run is not finished at step 7")


def test_a_folder_without_a_run_and_a_run_that_is_over_are_said(tmp_path):
    with pytest.raises(InputError, match=r"no metrics\.jsonl"):
        watch_of(tmp_path, None)
    directory = RunDirectory.create(tmp_path / "run", force=False)
    with pytest.raises(InputError, match="no process of the run"):
        watch_of(directory.path, None)
    directory.append(StartLine(time_seconds=0, step=7, micro_batch=8, baseline_bytes=1, wall_time="2026-11-24"))
    with pytest.raises(InputError, match=r"no process of the run .* \(at step 7\)"):
        watch_of(directory.path, None)
    for status in ("failed", "interrupted", "finished"):
        directory.append(EndLine(time_seconds=1.0, step=7, status=status))
        with pytest.raises(InputError, match=rf"is over \({status} at step 7\)"):
            watch_of(directory.path, None)


def test_the_command_of_a_run_is_found_by_its_claim(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", force=False)
    with directory.claimed(), watch_of(directory.path, None) as watch:
        (sample,) = watch.samples(1.0, 1)
        assert watch.head().subject == "run run"
    assert sample.processes[0].pid == os.getpid()
    assert sample.run.status == "preparing"
    with directory.locked(), watch_of(directory.path, None) as watch:  # its command has ended
        (sample,) = watch.samples(1.0, 1)
    assert sample.processes[0].pid == os.getpid()
    with watch_of(None, os.getpid()) as watch:
        assert watch.head().subject == f"process {os.getpid()}"


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def group():
    """Yield a control group of 96 MiB, if this machine allows one."""
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
    assert "counted by its control group" in end.text


def test_a_signal_without_a_name_is_told_by_its_number():
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process,
        Watch(process.pid) as watch,
    ):
        process.send_signal(signal.SIGRTMIN + 1)
        process.wait()
        end = watch.end()
    assert end.how in {"killed", "gone"}  # its exit code is readable since Linux 6.15
    assert end.how == "gone" or f"signal {signal.SIGRTMIN + 1}" in end.text
