"""Pages of real files in the real page cache: requested pages are loaded, dropped ones are gone, others stay."""

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from page_cache import cached_share, mapped_weights
from plimsoll.device.cpu.pages import (
    Stretch,
    bring,
    cache_free_bytes,
    cold_bytes_per_second,
    drop,
    prefer_large,
    stretches_of,
)

PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the page cache is Linux's")


def test_what_touches_is_one_stretch_and_what_does_not_is_another():
    whole = torch.empty(64 * PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    borders = ((0, PAGE + 1), (PAGE + 8, 2 * PAGE), (9 * PAGE, 10 * PAGE))
    first, second, far = (whole[start + begin : start + end] for begin, end in borders)
    base = whole.data_ptr() + start
    assert stretches_of([far, second, first]) == (Stretch(base, 2 * PAGE), Stretch(base + 9 * PAGE, PAGE))


def test_a_tensor_that_is_there_twice_or_has_nothing_adds_nothing():
    weight = torch.empty(100)
    assert stretches_of([weight, weight, weight[:10], torch.empty(0)]) == (Stretch(weight.data_ptr(), 400),)


def test_pages_come_and_go(tmp_path):
    first, second, third = mapped_weights(tmp_path / "weights", (700, 40, 3))
    assert [cached_share(stretches_of([one])) for one in (first, second, third)] == [0, 0, 0]
    bring(stretches_of([first]))  # more than one call
    bring(stretches_of([third]))
    assert [cached_share(stretches_of([one])) for one in (first, second, third)] == [1, 0, 1]
    drop(stretches_of([first]))
    assert [cached_share(stretches_of([one])) for one in (first, second, third)] == [0, 0, 1]


def test_what_is_dropped_is_still_the_same(tmp_path):
    (weight,) = mapped_weights(tmp_path / "weights", (16,))
    before = weight.clone()
    drop(stretches_of([weight]))
    assert torch.equal(weight, before)


def test_only_whole_pages_are_dropped(tmp_path):
    (weight,) = mapped_weights(tmp_path / "weights", (4,))
    bring(stretches_of([weight]))
    drop(stretches_of([weight[100 : 3 * PAGE]]))
    shares = [cached_share(stretches_of([weight[number * PAGE : (number + 1) * PAGE]])) for number in range(4)]
    assert shares == [1, 0, 0, 1]


def test_a_file_without_a_name_is_dropped_too(tmp_path):
    (weight,) = mapped_weights(tmp_path / "weights", (16,))
    (tmp_path / "weights").unlink()
    bring(stretches_of([weight]))
    drop(stretches_of([weight]))
    assert cached_share(stretches_of([weight])) == 0


def test_memory_that_is_no_files_keeps_its_values():
    memory = torch.ones(32 * PAGE)
    bring(stretches_of([memory]))
    drop(stretches_of([memory]))
    assert memory.min() == 1


def test_the_rate_of_a_file_is_that_of_its_bytes(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(1 << 20))
    (tmp_path / "empty").touch()
    assert 1e5 < cold_bytes_per_second([path, tmp_path / "empty"]) < 1e12


def test_the_cache_has_room():
    assert 0 < cache_free_bytes() < 1 << 50


def test_large_pages_are_asked_for_and_change_nothing():
    memory = torch.arange(1 << 22)
    prefer_large(stretches_of([memory]))
    prefer_large(stretches_of([memory[:10]]))  # less than a page
    assert torch.equal(memory, torch.arange(1 << 22))
    assert "hg" in flags_of(memory.data_ptr() + (1 << 21))


def flags_of(address):
    """Return the flags of the mapping that contains an address, as reported by the kernel."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.partition(" ")[0].partition("-")
        if last:
            is_it = int(first, 16) <= address < int(last, 16)
        elif is_it and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []
