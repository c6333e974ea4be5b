"""Tensors in files: what is under a name is whole, and what cannot be kept is refused with the numbers."""

import errno
import os

import pytest
import torch

from plimsoll.embeddings.host_files import create, reopen, unnamed
from plimsoll.errors import OutputError
from processes import run_program


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
from plimsoll.embeddings.host_files import create, unnamed
before = process.private_memory()
folder = Path(sys.argv[1])
shape = (1 << 20, 25), torch.float32
tensors = [create(folder / "table", *shape, lambda t: t.fill_(1)), unnamed(folder, *shape).fill_(1)]
after = process.private_memory()
assert max(b - a for a, b in zip(before, after)) < 20 << 20, (before, after)
"""
    done = run_program(program, tmp_path)
    assert done.returncode == 0, done.stderr
