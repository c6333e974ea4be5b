"""Memory use of processes observed from outside, and the limits that apply to them."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll.device.cuda.nvml import GpuUse
from plimsoll.device.watched import family_of, largest, lines_of
from plimsoll.records.watch import ProcessUse
from processes import LONGEST_SECONDS

MIB = 1 << 20
HOLD = "import sys; held = bytearray(b'x' * (64 << 20)); print('ready', flush=True); sys.stdin.read()"


def _held(code, **options):
    return subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, **options)


def _limit():
    resource.setrlimit(resource.RLIMIT_DATA, (512 * MIB, 512 * MIB))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))


def test_a_process_shows_what_it_holds_and_its_own_limit():
    with _held(HOLD, preexec_fn=_limit) as process:
        process.stdout.readline()
        (use,) = family_of(process.pid)
        process.stdin.close()
    assert use.parent == os.getpid()
    assert 64 * MIB <= use.private_bytes <= use.data_bytes < 512 * MIB
    assert use.data_limit_bytes == 512 * MIB
    assert use.address_bytes >= use.data_bytes
    assert (use.address_limit_bytes, use.gpu_bytes) == (1 << 40, None)


def test_children_come_after_their_parent():
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"
    with _held(code) as process:
        process.stdout.readline()
        parent, child = family_of(process.pid)
        process.stdin.close()
    assert (parent.pid, child.parent) == (process.pid, process.pid)
    assert child.private_bytes - parent.private_bytes > 50 * MIB


def test_a_process_that_was_killed_is_gone_also_before_its_parent_asked_how():
    with _held(HOLD) as process:
        process.stdout.readline()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert family_of(process.pid) == ()
    assert family_of(process.pid) == ()


def test_the_largest_of_the_machine_come_first():
    with _held(HOLD.replace("64", "200")) as process:
        process.stdout.readline()
        found = largest(500)
        process.stdin.close()
    sizes = [use.private_bytes for use in found]
    assert sizes == sorted(sizes, reverse=True)
    assert process.pid in {use.pid for use in found}
    assert len(largest(1)) == 1


def test_gpu_memory_is_that_of_all_gpus_and_unknown_where_one_does_not_say():
    pid = os.getpid()
    both = [GpuUse(index, "GPU", 100, 50, {pid: 20 + index, 1: 5}) for index in range(2)]
    silent = GpuUse(2, "GPU", 100, 50, {pid: None})
    other = GpuUse(3, "GPU", 100, 50, {1: 7})
    assert family_of(pid, both)[0].gpu_bytes == 41
    assert family_of(pid, [*both, silent])[0].gpu_bytes is None
    assert family_of(pid, [other])[0].gpu_bytes is None


THREADS = """
import subprocess, sys, threading
child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
thread = threading.Thread(target=subprocess.run, args=([sys.executable, "-c", child],))
thread.start()
thread.join()
"""


@pytest.mark.parametrize("has_lists", [True, False], ids=["lists of children", "no lists"])
def test_what_a_thread_started_and_what_that_started_are_found(has_lists, monkeypatch):
    if not has_lists:  # a kernel without CONFIG_PROC_CHILDREN
        monkeypatch.setattr(Path, "exists", lambda path: False)
    with _held(THREADS) as process:
        until = time.monotonic() + LONGEST_SECONDS
        while len(found := family_of(process.pid)) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        process.stdin.close()
    first, child, grandchild = found
    assert (first.pid, child.parent, grandchild.parent) == (process.pid, process.pid, child.pid)


NO_PROCESS = (1 << 22) + 1  # above the most that the kernel numbers


def _use(pid, **limits):
    return ProcessUse(
        pid=pid, parent=1, name="x", private_bytes=1, file_bytes=1, shared_bytes=1, swap_bytes=0, data_bytes=7,
        address_bytes=9, **limits,
    )  # fmt: skip


def _named(lines, kind):
    return [(line.name, line.used_bytes, line.limit_bytes) for line in lines if line.kind == kind]


def test_limits_of_each_process_have_its_number():
    lines = lines_of([_use(os.getpid(), data_limit_bytes=70), _use(5, address_limit_bytes=90)])
    assert _named(lines, "data") == [(f"RLIMIT_DATA of {os.getpid()}", 7, 70)]
    assert _named(lines, "address") == [("RLIMIT_AS of 5", 9, 90)]


def test_the_machine_and_shared_memory_are_limits_with_what_is_used_of_them():
    lines = lines_of(family_of(os.getpid()))
    for kind in ("machine", "shm"):
        ((_, used_bytes, limit_bytes),) = _named(lines, kind)
        assert 0 <= used_bytes <= limit_bytes
    assert len({line.name for line in lines}) == len(lines)


def test_shared_memory_grows_by_what_is_written_there():
    before = _named(lines_of(family_of(os.getpid())), "shm")[0][1]
    path = f"/dev/shm/plimsoll-test-{os.getpid()}"
    try:
        with open(path, "wb") as file:
            file.write(bytes(8 << 20))
        after = _named(lines_of(family_of(os.getpid())), "shm")[0][1]
    finally:
        os.unlink(path)
    assert after - before >= 4 << 20  # others may free some meanwhile


def test_a_gpu_counts_where_the_process_or_one_nobody_knows_here_uses_it():
    own = _use(os.getpid())
    used, hidden, idle, others = (
        GpuUse(index, "H", 100, 50, users) for index, users in enumerate([{own.pid: 5}, {NO_PROCESS: 5}, {}, {1: 5}])
    )
    gpus = [used, hidden, idle, others]
    assert _named(lines_of([own], gpus), "gpu") == [("GPU 0 (H)", 50, 100), ("GPU 1 (H)", 50, 100)]
    assert len(_named(lines_of([own], gpus, is_machine=True), "gpu")) == 4


def test_processes_that_have_ended_leave_the_limits_of_the_machine():
    assert _named(lines_of([]), "machine")
    assert _named(lines_of([_use(NO_PROCESS)]), "shm")
