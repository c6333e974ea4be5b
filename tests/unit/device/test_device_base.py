"""The name of a device leads to its backend, or to an error that helps.

Also the limit without a job, as users apply it in their own loop.
"""

import pytest
import torch

from plimsoll.device.base import backend_for, limited
from plimsoll.errors import BudgetError, DeviceError, InputError
from processes import run_program


def test_the_cpu_has_its_backend():
    assert backend_for("cpu").kind == "cpu"


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cpu:0", ""])
def test_an_unknown_device_is_refused_by_name(name):
    with pytest.raises(DeviceError, match=f"no device '{name}': give cpu, cuda, or cuda and a number"):
        backend_for(name)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built with CUDA")
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_cuda_without_a_cuda_build_says_what_to_install(name):
    index = name.partition(":")[2] or "0"
    with pytest.raises(
        DeviceError, match=rf"cuda:{index}: this torch .* is built without CUDA; install .* or give the device as cpu"
    ):
        backend_for(name)


PROGRAM = """
import plimsoll, torch
torch.ones(512, 512) @ torch.ones(512, 512)
with plimsoll.limited("2GiB"):  # starts the thread pools
    pass
used_bytes = plimsoll.probe().devices[0].use.used_bytes

def fits(num_bytes):
    try:
        torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True

print(fits(1 << 30))
with plimsoll.limited(used_bytes + (256 << 20)):
    print(fits(1 << 30), fits(128 << 20))
print(fits(1 << 30))
"""


def test_inside_an_allocation_past_the_budget_raises_and_afterwards_it_does_not():
    assert run_program(PROGRAM).stdout.splitlines() == ["True", "False True", "True"]


def test_a_budget_below_what_is_in_use_is_refused():
    with (
        pytest.raises(BudgetError, match=r"cannot limit this process to 1\.0 MiB: it uses .* give more than"),
        limited("1MiB"),
    ):
        pass


def test_a_budget_beyond_the_machine_is_refused():
    with pytest.raises(BudgetError, match=r"give that or less \(`plimsoll probe` lists the limits\)"), limited(1 << 60):
        pass


def test_what_is_not_a_size_is_refused_at_once():
    with pytest.raises(InputError, match="cannot read 'much' as a size in bytes"):
        limited("much")


def test_an_unknown_device_is_refused_at_once():
    with pytest.raises(DeviceError, match="there is no device 'tpu'"):
        limited("2GiB", "tpu")
