"""Tensors in files: pools of them, and named ones, which are complete or refused with the numbers."""

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from plimsoll.device.mapped_memory import MappedPool, _file_system_of, create, reopen, scratch_folder, unnamed
from plimsoll.errors import OutputError
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.trace import dry_run
from processes import run_program


def num_mapped_files(folder):
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24.0).view(2, 3, 4)[:, :, 1],
        torch.arange(5).to(torch.bfloat16),
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.ones(1, 3).expand(4, 3),
        torch.tensor([True, False]),
    ],
    ids=["matrix", "transposed", "with gaps", "bfloat16", "a number", "empty", "expanded", "truth values"],
)
def test_a_copy_is_the_same_tensor_elsewhere(tensor):
    copy = MappedPool().copy_of(tensor)
    assert torch.equal(copy, tensor)
    assert copy.dtype is tensor.dtype
    assert copy.data_ptr() % 64 == 0
    assert not copy.requires_grad


def test_a_dense_tensor_keeps_its_strides():
    pool = MappedPool()
    channels_last = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert pool.empty_like(channels_last).stride() == channels_last.stride()
    assert pool.empty_like(torch.empty(3, 4).t()).stride() == (1, 4)
    assert pool.empty_like(torch.empty(3, 4)[:, :2]).stride() == (2, 1)


def test_what_a_tensor_gives_back_is_used_again():
    pool = MappedPool()
    first, second, third = (pool.empty_like(torch.empty(64)) for _ in range(3))  # 256 bytes each
    address = first.data_ptr()
    assert pool.used_bytes == 3 * 256
    view = first.view(8, 8)[1:]
    del first
    assert pool.used_bytes == 3 * 256  # a view keeps it
    del view, second
    assert pool.used_bytes == 256
    again = pool.empty_like(torch.empty(128))  # the 512 bytes of the two, joined
    assert again.data_ptr() == address
    assert pool.num_bytes == 16 << 20
    del third, again
    assert pool.used_bytes == 0


def test_a_file_that_is_full_is_followed_by_another():
    pool = MappedPool()
    kept = [pool.empty_like(torch.empty(3 << 20, dtype=torch.uint8)) for _ in range(7)]
    assert pool.num_bytes == (16 + 16) << 20  # five in the first, then as much again
    large = pool.empty_like(torch.empty(100 << 20, dtype=torch.uint8))
    assert pool.num_bytes == (32 + 100) << 20
    assert all(map(pool.holds, [*kept, large]))
    assert not pool.holds(torch.empty(3))


def test_what_was_reserved_is_one_file():
    pool = MappedPool()
    pool.reserve(20 << 20)
    pool.reserve(20 << 20)
    assert pool.num_bytes == 20 << 20
    kept = pool.empty_like(torch.empty(20 << 20, dtype=torch.uint8))
    assert pool.num_bytes == 20 << 20
    del kept


def test_the_files_have_no_name_and_die_with_the_last_tensor(tmp_path):
    pool = MappedPool(tmp_path)
    tensor = pool.copy_of(torch.arange(1000))
    assert list(tmp_path.iterdir()) == []
    assert num_mapped_files(tmp_path) == 1
    del pool
    assert tensor.sum() == 999 * 500
    assert num_mapped_files(tmp_path) == 1
    del tensor
    gc.collect()
    assert num_mapped_files(tmp_path) == 0
    open_files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not any(str(tmp_path) in os.readlink(file) for file in open_files if file.is_symlink())


USES_MEMORY = """
import torch
from plimsoll.device.process import private_bytes
from plimsoll.device.mapped_memory import MappedPool
pool, like = MappedPool(), torch.empty(16 << 20)
pool.copy_of(torch.ones(3))  # what is loaded and started once
before = private_bytes()
mapped = [pool.empty_like(like).fill_(1) for _ in range(4)]
print(private_bytes() - before)
"""


def test_their_memory_is_not_private():
    done = run_program(USES_MEMORY)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 << 20  # of 256 MiB that were written


FULL = """
import resource
import torch
from plimsoll.errors import OutputError
from plimsoll.device.mapped_memory import MappedPool
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    MappedPool().empty_like(torch.empty(1000))
except OutputError as error:
    print(error)
"""


def test_a_file_that_cannot_be_written_is_an_error_that_says_what_to_do(tmp_path):
    done = run_program(FULL, PLIMSOLL_SCRATCH=str(tmp_path))
    assert done.stdout == (
        f"cannot keep 16.0 MiB of the training in a file in {tmp_path}: File too large; free some space there, or set "
        "PLIMSOLL_SCRATCH to a folder on a disk with enough space\n"
    ), done.stderr


def test_the_folder_is_the_one_that_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_SCRATCH", str(tmp_path))
    assert scratch_folder() == tmp_path
    monkeypatch.setenv("PLIMSOLL_SCRATCH", str(tmp_path / "missing"))
    with pytest.raises(OutputError, match="set PLIMSOLL_SCRATCH to a folder on a disk"):
        scratch_folder()


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a folder that is kept in memory")
def test_a_folder_that_is_memory_is_refused(monkeypatch):
    assert _file_system_of(Path("/dev/shm")) == "tmpfs"
    monkeypatch.setenv("PLIMSOLL_SCRATCH", "/dev/shm")
    with pytest.raises(OutputError, match=r"/dev/shm: it is not a folder, or it is kept in memory \(tmpfs\)"):
        MappedPool().empty_like(torch.empty(3))


def test_in_a_dry_run_they_are_fake_and_outside_the_device():
    pool = MappedPool(Path("nowhere"))
    with dry_run(CpuLowering(), lambda: "forward") as stage:
        inside = torch.empty(100, 10)
        copy = pool.copy_of(inside.t())
    storages = stage.trace().storages
    assert copy.stride() == (1, 10)
    assert sorted(zip(storages.num_bytes, storages.on_host, strict=True)) == [(4000, False), (4000, True)]
    assert pool.num_bytes == 0


def test_what_stands_for_a_tensor_of_the_pool_is_kept():
    pool, stand_in = MappedPool(), torch.zeros(4)
    assert not pool.holds(stand_in)
    pool.know(stand_in)
    assert pool.holds(stand_in)
    assert pool.used_bytes == 0


def test_a_file_gets_its_name_when_it_is_filled(tmp_path):
    path = tmp_path / "table"
    seen = []
    tensor = create(path, (3, 2), torch.float32, lambda t: seen.append(path.exists()) or t.fill_(5))
    assert (seen, os.listdir(tmp_path)) == ([False], ["table"])
    assert reopen(path, (3, 2), torch.float32).tolist() == tensor.tolist() == [[5, 5]] * 3
    with pytest.raises(OutputError, match="it exists; remove it, or give another path"):
        create(path, (3, 2), torch.float32, torch.Tensor.zero_)


def test_a_file_that_cannot_be_filled_is_not_left_behind(tmp_path):
    def fail(tensor):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create(tmp_path / "table", (3, 2), torch.float32, fail)
    assert os.listdir(tmp_path) == []


def test_what_is_left_of_a_killed_process_is_overwritten(tmp_path):
    (tmp_path / "table.part").write_bytes(b"x" * 100)
    assert create(tmp_path / "table", (3, 2), torch.float32, torch.Tensor.zero_).tolist() == [[0, 0]] * 3
    assert (tmp_path / "table").stat().st_size == 24


def test_a_full_disk_is_an_error_with_the_numbers(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    for make in (
        lambda: create(tmp_path / "a", (1024, 256), torch.float32, id),
        lambda: unnamed(tmp_path, (1024, 256), torch.float32),
    ):
        with pytest.raises(
            OutputError, match=r"1,024 rows of 256 torch.float32 \(1.0 MiB\).*No space left.*; free some"
        ):
            make()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    for make in (create, reopen):
        with pytest.raises(OutputError, match="cannot open the table .*No such file.*give a path"):
            make(tmp_path / "nowhere" / "table", (1, 1), torch.float32, *([id] if make is create else []))
    with pytest.raises(OutputError, match="No such file"):
        unnamed(tmp_path / "nowhere", (1, 1), torch.float32)


def test_an_unnamed_one_is_of_zeros_and_leaves_nothing(tmp_path):
    assert not unnamed(tmp_path, (7, 3), torch.float16).any()
    assert os.listdir(tmp_path) == []


def test_it_takes_no_private_memory(tmp_path):
    program = """
import sys, torch
from pathlib import Path
from plimsoll.device import process
from plimsoll.device.mapped_memory import create, unnamed
before = process.private_memory()
folder = Path(sys.argv[1])
shape = (1 << 20, 25), torch.float32
tensors = [create(folder / "table", *shape, lambda t: t.fill_(1)), unnamed(folder, *shape).fill_(1)]
after = process.private_memory()
assert max(b - a for a, b in zip(before, after)) < 20 << 20, (before, after)
"""
    done = run_program(program, tmp_path)
    assert done.returncode == 0, done.stderr
