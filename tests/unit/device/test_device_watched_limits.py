import os

from plimsoll.device.cuda.nvml import GpuUse
from plimsoll.device.watched import family_of
from plimsoll.device.watched_limits import lines_of
from plimsoll.records.watch import ProcessUse

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
