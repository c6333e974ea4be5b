"""An error flag that oneDNN keeps, set in a process without free memory, and cached kernels."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plimsoll.device.cpu import onednn
from processor import INSTRUCTION_SETS

OUT_OF_MEMORY = """
import json, resource, torch
from plimsoll.device import process
from plimsoll.device.cpu import onednn

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


# Each case has a separate fork, because oneDNN compiles a kernel only once in a process.
LSTM_IN_LITTLE_MEMORY = """
import hashlib, json, os, resource, torch
from plimsoll.device import process
from plimsoll.device.cpu import onednn

torch.set_num_threads(1)
layer, inputs = torch.nn.LSTM(48, 64, batch_first=True), torch.randn(1, 30, 48)

def passes():
    layer.zero_grad()
    try:
        layer(inputs)[0].square().sum().backward()
    except (RuntimeError, MemoryError) as error:  # Python has no memory either
        return str(error)
    return hashlib.sha256(b"".join(weight.grad.numpy().tobytes() for weight in layer.parameters())).hexdigest()

def passes_in(free_bytes):
    limits, hog = resource.getrlimit(resource.RLIMIT_DATA), []
    resource.setrlimit(resource.RLIMIT_DATA, (process.data_bytes() + (8 << 20), limits[1]))
    try:
        while True:
            hog.append(torch.empty(1 << 14))
    except (RuntimeError, MemoryError):
        del hog[-free_bytes >> 16 :]
        passes()
    hog.clear()
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    onednn.clear_error()

def said(free_bytes, prepared):
    reader, writer = os.pipe()
    if os.fork() == 0:
        if prepared:
            onednn.prepare_for(layer)
        if free_bytes:
            passes_in(free_bytes)
        os.write(writer, passes().encode())
        os._exit(0)
    os.close(writer)
    return os.fdopen(reader).read() or "died"

rooms = [half << 19 for half in range(1, 12)]
print(json.dumps([[said(room, prepared) for room in (0, *rooms)] for prepared in (False, True)]))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN compiles with Xbyak on x86-64 only")
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_an_lstm_that_had_no_memory_runs_later_with_the_same_bits(instructions):
    variables = dict(os.environ) | instructions
    command = [sys.executable, "-c", LSTM_IN_LITTLE_MEMORY]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    (usual, *unprepared), prepared = json.loads(done.stdout)
    assert set(prepared) == {usual}, done.stderr
    if set(unprepared) == {usual}:
        pytest.skip("the oneDNN of this torch forgets what it could not compile, or compiles nothing here")


MODELS = {
    "lstm": (lambda: torch.nn.LSTM(2, 2), 1),
    "an lstm in a model": (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LSTM(2, 2)), 1),
    "bfloat16, which has kernels for each shape": (lambda: torch.nn.LSTM(2, 2, dtype=torch.bfloat16), 0),
    "no memory": (lambda: torch.nn.LSTM(2, 2, device="meta"), 0),
    "gru": (lambda: torch.nn.GRU(2, 2), 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_only_for_an_lstm_in_float32_something_is_compiled(name, monkeypatch):
    calls = []
    monkeypatch.setattr(onednn, "_compile_products", lambda: calls.append(name))
    make, num_calls = MODELS[name]
    onednn.prepare_for(make())
    with FakeTensorMode():
        onednn.prepare_for(torch.nn.LSTM(2, 2))
    assert len(calls) == num_calls


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_preparing_goes_backwards_in_any_mode_and_draws_no_random_numbers(mode):
    state = torch.get_rng_state()
    with mode():
        onednn._compile_products.__wrapped__()
    assert torch.equal(state, torch.get_rng_state())


CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

# Each case has a separate fork: oneDNN reads the environment at its first use, and loading torch is slow.
MANY_SHAPES = """
import json, os, sys, torch
from plimsoll.device import process
from plimsoll.device.cpu.backend import CpuBackend

torch.set_num_threads(1)
layer, backend = torch.nn.Linear(256, 256, dtype=torch.bfloat16), CpuBackend()

def measured():
    backend.baseline_bytes()  # as a training process does before there is a limit
    sizes = []
    with torch.inference_mode():
        for num_rows in range(8, 408):
            layer(torch.ones(num_rows, 256, dtype=torch.bfloat16))
            if num_rows in (207, 407):
                backend.release()  # free pages between kernels are glibc's, not oneDNN's
                sizes.append([process.private_bytes(), process.code_bytes()])
    return {"sizes": sizes, "capacity": os.environ["LRU_CACHE_CAPACITY"]}

for variables in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.environ.update(variables)
        print(json.dumps(measured()), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN compiles with Xbyak on x86-64 only")
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_kernels_of_many_shapes_are_not_kept(instructions):
    """For 200 more shapes, at most an eighth of the memory is kept that the user's own capacity keeps."""
    of_the_user = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1000"}
    few_kept, all_kept = many_shapes(instructions, {}, of_the_user)
    assert (few_kept["capacity"], all_kept["capacity"]) == ("32", "1000")
    private_bytes, code_bytes = growth(few_kept)
    all_private_bytes, all_code_bytes = growth(all_kept)
    if all_code_bytes == 0:
        pytest.skip("oneDNN makes no code for bfloat16 with these instructions")
    print(f"{private_bytes} of {all_private_bytes} bytes, {code_bytes} of {all_code_bytes} bytes of code")
    assert private_bytes < all_private_bytes / 8
    assert code_bytes < all_code_bytes / 8


def many_shapes(instructions, *environments):
    variables = {name: value for name, value in os.environ.items() if name not in CAPACITIES} | instructions
    command = [sys.executable, "-c", MANY_SHAPES, json.dumps(environments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def growth(found):
    (few_private, few_code), (many_private, many_code) = found["sizes"]
    return many_private - few_private, many_code - few_code


@pytest.mark.parametrize("name", CAPACITIES)
def test_what_the_user_has_set_stays(name, monkeypatch):
    monkeypatch.setattr("os.environ", {name: "1024"})
    onednn.keep_few_kernels()
    assert os.environ[name] == "1024"
    assert (CAPACITIES[0] in os.environ) == (name != CAPACITIES[1])
