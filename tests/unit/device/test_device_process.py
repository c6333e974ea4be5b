"""The counters follow memory that is really allocated and freed."""

import mmap
import subprocess
import sys

import pytest

from plimsoll.device import process

MIB = 1 << 20


def _touched(num_bytes):
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * num_bytes)
    return block


def test_touched_memory_is_private_and_untouched_memory_is_only_data():
    before = process.private_memory()
    untouched = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    reserved = process.private_memory()
    assert reserved.data_bytes - before.data_bytes >= 64 * MIB
    assert reserved.private_bytes - before.private_bytes < 8 * MIB
    untouched.write(b"x" * 64 * MIB)
    assert process.private_bytes() - before.private_bytes >= 64 * MIB - MIB
    untouched.close()
    assert process.private_bytes() < before.private_bytes + 32 * MIB
    assert process.data_bytes() < before.data_bytes + 64 * MIB


def test_shared_memory_and_files_are_not_private():
    before = process.private_bytes()
    with mmap.mmap(-1, 64 * MIB) as shared:
        shared.write(b"x" * 64 * MIB)
        assert process.private_bytes() - before < 8 * MIB
        assert process.address_space_bytes() > 64 * MIB


def test_the_peak_stays_when_memory_is_given_back_and_goes_with_a_reset():
    counter = process.PeakCounter()
    counter.reset()
    before = process.private_bytes()
    _touched(64 * MIB).close()
    peak = counter.read(process.private_bytes())
    assert before + 62 * MIB <= peak <= before + 160 * MIB  # the block, and the bytes that were written into it
    counter.reset()
    assert counter.read(process.private_bytes()) < before + 32 * MIB


def test_files_that_were_mapped_in_between_are_not_part_of_the_peak(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * (128 * MIB))
    counter = process.PeakCounter()
    counter.reset()
    before = process.private_bytes()
    with open(tmp_path / "large", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[begin] for begin in range(0, len(mapped), 4096)) > 0
        counter.read(process.private_bytes())
    assert counter.read(process.private_bytes()) <= before + 16 * MIB


def test_another_process_is_read_by_its_number():
    code = "block = bytearray(b'x') * (64 << 20); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert process.private_bytes(child.pid) >= 64 * MIB
    child.communicate(b"\n")
    with pytest.raises(OSError, match=str(child.pid)):
        process.private_bytes(child.pid)


def test_code_that_is_made_while_it_runs_is_counted():
    before = process.code_bytes()
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    code = mmap.mmap(-1, 3 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=everything)
    data = mmap.mmap(-1, 5 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert process.code_bytes() == before + 3 * MIB
    code.close()
    data.close()
    assert process.code_bytes() == before
