"""The CPU backend: its facts about this machine, counted memory, and limits set by others."""

import json
import os
import subprocess
import sys

import psutil
import pytest
import torch

from plimsoll.device.cpu.backend import CpuBackend
from plimsoll.errors import BudgetError

MIB = 1 << 20


def test_the_probe_describes_this_machine():
    device = CpuBackend().probe()
    assert (device.kind, device.hardware_bytes) == ("cpu", psutil.virtual_memory().total)
    assert 0 < device.free_bytes <= device.capacity_bytes <= device.hardware_bytes
    assert device.capacity_bytes == min([device.hardware_bytes, *(limit.bytes for limit in device.limits)])
    assert device.num_cores == len(os.sched_getaffinity(0))
    assert device.name
    assert 0 < device.use.used_bytes <= device.use.peak_bytes
    assert device.use.limit_bytes is None


@pytest.mark.parametrize(("kind", "counted"), [("RLIMIT_DATA", "data_bytes"), ("RLIMIT_AS", "address_space_bytes")])
def test_a_limit_of_the_user_is_the_capacity(kind, counted):
    code = f"""
import resource
resource.setrlimit(resource.{kind}, (1 << 30, -1))
from plimsoll.device import process
from plimsoll.device.cpu.backend import CpuBackend
device = CpuBackend().probe()
print(device.to_json())
print(process.{counted}())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line, used_bytes = done.stdout.splitlines()
    device = json.loads(line)
    assert [limit["source"].split()[0] for limit in device["limits"]][-1] == kind
    assert device["capacity_bytes"] == 1 << 30
    assert abs((1 << 30) - int(used_bytes) - device["free_bytes"]) < 4 * MIB


def test_a_budget_above_the_capacity_is_refused_with_both_numbers():
    backend = CpuBackend()
    with (
        pytest.raises(BudgetError, match=r"to 1\.0 PiB: this machine lets it use at most .* GiB; give that or less"),
        backend.limited(1 << 50),
    ):
        pass


def test_what_was_freed_into_the_heap_is_given_back():
    backend = CpuBackend()
    blocks = [bytearray(b"x") * (100 << 10) for _ in range(640)]  # each below the size from which blocks are mapped
    kept = blocks[::64]
    taken_bytes = backend.use().used_bytes
    del blocks
    backend.release()
    assert taken_bytes - backend.use().used_bytes > 48 * MIB
    assert len(kept) == 10


_DISGUISE = """
import sys, torch
from plimsoll.device import process
from plimsoll.device.cpu.backend import CpuBackend
backend = CpuBackend()
disguise = RuntimeError("could not create a primitive")
families = [backend.oom_family(disguise)]
with backend.limited(process.private_bytes() + (1 << 30)):
    backend.reset_peak()
    families.append(backend.oom_family(disguise))
    kept = torch.ones(230 << 20)  # 920 MiB
    families.append(backend.oom_family(disguise))
print(families)
"""


def test_a_disguise_counts_only_where_the_budget_is_nearly_used():
    done = subprocess.run([sys.executable, "-c", _DISGUISE], capture_output=True, text=True, check=True)
    assert done.stdout == "[None, None, 'onednn']\n"


_NO_FRAME = """
import sys, torch
from plimsoll.device import process
from plimsoll.device.cpu.backend import CpuBackend
backend = CpuBackend()
sys.setrecursionlimit(1_000_000)

def deep(number):
    return 0 if number == 0 else 1 + deep(number - 1)

def filled(sizes, kept):
    for size in sizes:
        try:
            while True:
                kept.append(bytearray(size))
        except MemoryError:
            pass

kept = []
with backend.limited(process.private_bytes() + (1 << 26)):
    filled((100_000, 1_000, 8), kept)
    try:
        deep(20_000)
    except BaseException as error:
        kept.clear()
        print(backend.oom_family(error))
"""


def test_a_call_that_has_no_room_for_its_frame_is_out_of_memory():
    """CPython from 3.11 on raises a meaningless SystemError in this case."""
    done = subprocess.run([sys.executable, "-c", _NO_FRAME], capture_output=True, text=True, check=True)
    assert done.stdout == "memory-error\n"


def test_an_ordinary_error_is_none():
    assert CpuBackend().oom_family(RuntimeError("shapes differ")) is None
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert CpuBackend().oom_family(caught.value) == "cpu-allocator"


def test_memory_is_reserved_and_kept_or_the_allocators_own_error_is_raised():
    backend = CpuBackend()
    with backend.reserved([MIB, 2 * MIB]):
        pass
    with pytest.raises(RuntimeError) as raised:
        backend.reserved([MIB, 1 << 60])
    assert backend.oom_family(raised.value) is not None
