"""glibc really frees blocks at once if they are separate mappings."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cold  # a heap as a process begins with

_PROGRAM = """
import sys
from plimsoll.device import process
from plimsoll.device.cpu import heap
if sys.argv[1] == "mapped":
    heap.map_blocks_from(heap.TIGHT_BYTES)
else:
    heap.map_blocks_from(heap.USUAL_BYTES)
blocks = [bytearray(b"x") * (1 << 20) for _ in range(64)]
pins = []
for index in range(64):
    pins.append(bytearray(b"x") * 100_000)  # too large for the holes that importing leaves
    blocks.append(bytearray(b"x") * (1 << 20))
full, free = process.data_bytes(), heap.free_bytes()
del blocks
print((full - process.data_bytes()) >> 20, (heap.free_bytes() - free) >> 20)
heap.trim()
"""


@pytest.mark.parametrize(("how", "least_given_back", "least_free"), [("mapped", 120, 0), ("heap", 0, 60)])
def test_freed_blocks_stay_data_in_the_heap_and_not_when_mapped(how, least_given_back, least_free):
    done = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True)
    given_back, free = map(int, done.stdout.split())
    assert given_back >= least_given_back
    assert free >= least_free
    assert (given_back < 70) == (how == "heap")


_FAULTS = """
import resource
import torch
from plimsoll.device.cpu import heap
torch.set_num_threads(1)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)  # 64 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

heap.keep_freed()
print(*(faults() for _ in range(12)))  # a block fits its own hole only once small ones beside it are joined
heap.map_blocks_from(heap.FAST_BYTES)
heap.trim()
print(faults(), faults())
"""


def test_what_is_kept_is_not_cleared_anew_and_afterwards_it_is():
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    kept, mapped = (list(map(int, line.split())) for line in done.stdout.splitlines())
    assert max(kept[-3:]) < 0.1 * kept[0]
    assert min(mapped) > 0.9 * kept[0]
