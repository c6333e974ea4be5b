"""`plimsoll.device.onednn`: a memory error that oneDNN does not forget, made in a process that has no memory left."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from plimsoll.device import onednn

OUT_OF_MEMORY = """
import json, resource, torch
from plimsoll.device import onednn, process

torch.set_num_threads(1)
inputs = {width: torch.ones(3, width, 100) for width in (8, 16, 40, 48)}
outputs = {width: torch.empty_like(tensor) for width, tensor in inputs.items()}

def gelu(width):
    try:
        torch._C._nn.gelu(inputs[width], out=outputs[width])
        return "ok"
    except RuntimeError as error:
        return str(error)

said = {"before": gelu(8), "nothing_noted": onednn.clear_error()}
limits, hog = resource.getrlimit(resource.RLIMIT_DATA), []
resource.setrlimit(resource.RLIMIT_DATA, (process.data_bytes() + (1 << 20), limits[1]))
try:
    while True:
        hog.append(torch.empty(1 << 14))
except RuntimeError:
    del hog[-1:]
    said["full"] = gelu(16)
hog.clear()
resource.setrlimit(resource.RLIMIT_DATA, limits)
said |= {"free_again": gelu(40), "known_shape": gelu(8), "cleared": onednn.clear_error(), "after": gelu(48)}
print(json.dumps(said))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN compiles with Xbyak on x86-64 only")
def test_a_memory_error_of_onednn_is_forgotten():
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    if said["free_again"] == "ok":
        pytest.skip("the oneDNN of this torch forgets its errors itself, or had the memory")
    assert said == {
        "before": "ok",
        "nothing_noted": False,
        "full": "could not create a primitive",
        "free_again": "could not create a primitive",
        "known_shape": "ok",
        "cleared": True,
        "after": "ok",
    }


def test_a_library_without_the_variable_has_nothing_to_clear(tmp_path):
    script = tmp_path / "library.so"
    script.write_text("not a library")
    assert onednn._offset_in_thread(script) is None
    assert onednn._offset_in_thread(tmp_path / "absent.so") is None


CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

MANY_SHAPES = """
import json, os, torch
from plimsoll.device import process
from plimsoll.device.cpu import CpuBackend

torch.set_num_threads(1)
layer = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
CpuBackend().baseline_bytes()  # as a training process does before there is a limit
sizes = []
with torch.inference_mode():
    for num_rows in range(8, 408):
        layer(torch.ones(num_rows, 256, dtype=torch.bfloat16))
        if num_rows in (8, 207, 407):
            sizes.append([process.private_bytes(), process.code_bytes()])
print(json.dumps([sizes, os.environ["LRU_CACHE_CAPACITY"]]))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN compiles with Xbyak on x86-64 only")
def test_kernels_of_many_shapes_are_not_kept(monkeypatch):
    for name in CAPACITIES:
        monkeypatch.delenv(name, raising=False)
    (_, few, many), capacity = shapes()
    assert capacity == "32"
    assert many[0] - few[0] < 4 << 20
    assert many[1] - few[1] < 4 << 20
    if many[1] == few[1]:
        pytest.skip("the oneDNN of this processor makes no code for bfloat16")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")  # the user's own
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1000")
    (_, few, many), capacity = shapes()
    assert capacity == "1000"
    assert many[1] - few[1] > 16 << 20


def shapes():
    done = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CAPACITIES)
def test_what_the_user_has_set_stays(name, monkeypatch):
    monkeypatch.setattr("os.environ", {name: "1024"})
    onednn.keep_few_kernels()
    assert os.environ[name] == "1024"
    assert (CAPACITIES[0] in os.environ) == (name != CAPACITIES[1])
