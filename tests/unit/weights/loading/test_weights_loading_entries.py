"""One tensor of a file: read into any memory, in parts, and mapped without private memory."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from plimsoll.device import process
from plimsoll.errors import WeightsError
from plimsoll.weights.loading.entries import _BLOCK_BYTES, Entry, WeightFile
from plimsoll.weights.loading.opening import entries_of


def entry_of(path, tensor: torch.Tensor) -> Entry:
    save_file({"w": tensor}, path)
    return entries_of(path)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_of_several_blocks_is_converted_as_torch_does(tmp_path, dtype):
    value = torch.randn(_BLOCK_BYTES // 4 * 2 + 12345)
    told = []
    target = torch.empty(value.shape, dtype=dtype)
    entry_of(tmp_path / "a", value).read_into(target, told.append)
    assert torch.equal(target, value.to(dtype))
    assert sum(told) == value.numel() * 4
    assert max(told) <= _BLOCK_BYTES


def test_a_target_that_is_not_contiguous_is_filled(tmp_path):
    value = torch.randn(4, 6)
    target = torch.empty(6, 4).t()
    entry_of(tmp_path / "a", value).read_into(target)
    assert torch.equal(target, value)


def test_rows_are_tensors_of_their_own(tmp_path):
    value = torch.randn(10, 3, 2)
    assert torch.equal(entry_of(tmp_path / "a", value).rows(3, 7).read(), value[3:7])


@pytest.mark.parametrize("is_read_only", [False, True])
def test_mapped_tensors_take_no_private_memory_and_share_one_map(is_read_only, tmp_path):
    value = torch.ones(64 << 20, dtype=torch.uint8)
    entry = entry_of(tmp_path / "a", value)
    del value
    before = process.private_memory()
    one, other = entry.mapped(is_read_only), entry.mapped(is_read_only)
    assert one.data_ptr() == other.data_ptr()
    assert int(one.sum(dtype=torch.int64)) == 64 << 20
    after = process.private_memory()
    assert after.private_bytes - before.private_bytes < 8 << 20
    assert (after.data_bytes - before.data_bytes < 8 << 20) is is_read_only  # the memory that ulimit -d counts


def test_what_is_written_becomes_private_memory_and_never_reaches_the_file(tmp_path):
    entry = entry_of(tmp_path / "a", torch.ones(64 << 20, dtype=torch.uint8))
    content, before = (tmp_path / "a").read_bytes(), process.private_bytes()
    mapped = entry.mapped()
    mapped[: 32 << 20] += 1
    assert (mapped[0], mapped[-1]) == (2, 1)
    assert 24 << 20 < process.private_bytes() - before < 40 << 20
    assert entry.mapped(is_read_only=True)[0] == 1
    assert (tmp_path / "a").read_bytes() == content


def test_the_map_goes_with_the_last_tensor(tmp_path):
    entry = entry_of(tmp_path / "a", torch.randn(10))
    mapped = entry.mapped()
    assert len(entry.source._maps) == 1
    del mapped
    assert not entry.source._maps


_LIMITED = """
import resource, sys
from pathlib import Path
from plimsoll.errors import WeightsError
from plimsoll.weights.loading.opening import entries_of
entry = entries_of(Path(sys.argv[1]))[0]
from plimsoll.device import process
resource.setrlimit(resource.RLIMIT_DATA, (process.data_bytes() + (32 << 20), -1))
print(entry.mapped(is_read_only=True).sum().item())
try:
    entry.mapped()
except WeightsError as error:
    print(error)
"""


def test_a_limit_of_others_counts_what_could_be_written_and_is_named(tmp_path):
    entry_of(tmp_path / "a", torch.ones(16 << 20))
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(tmp_path / "a")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read, said = done.stdout.splitlines()
    assert float(read) == 16 << 20
    assert "a limit on this process (ulimit -d, ulimit -v) counts all of it; raise it, or use place read-only" in said


def test_a_tensor_that_begins_at_an_odd_byte_is_read_but_not_mapped(tmp_path):
    path = tmp_path / "a"
    save_file({"a": torch.ones(3, dtype=torch.uint8)}, path)
    raw = path.read_bytes() + torch.tensor([1.5, 2.5]).numpy().tobytes()
    path.write_bytes(raw)
    entry = Entry("w", torch.float32, (2,), WeightFile(path, len(raw)), len(raw) - 8, 8)
    assert not entry.can_be_mapped
    assert entry.read().tolist() == [1.5, 2.5]
    with pytest.raises(WeightsError, match=r"`w` begins at byte \d+ of .*use place memory"):
        entry.mapped()


def test_a_file_that_became_shorter_or_is_gone_is_named(tmp_path):
    entry = entry_of(tmp_path / "a", torch.randn(100))
    os.truncate(tmp_path / "a", 200)
    with pytest.raises(WeightsError, match="ends at byte 200, but had"):
        entry.read()
    (tmp_path / "a").unlink()
    with pytest.raises(WeightsError, match="cannot open .*No such file"):
        entry.read()
