"""A device's name leads to its backend or to a sentence that helps."""

import pytest
import torch

from plimsoll.device.base import backend_for
from plimsoll.errors import DeviceError


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
