"""Under a memory limit, mapped weights count before an optimizer writes them. Pages that are only read never count."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

_PROGRAM = """
import sys
from pathlib import Path
import torch
from plimsoll.device import process
from plimsoll.device.cpu import data_limit
from plimsoll.device.cpu.backend import CpuBackend
from plimsoll.weights.loading.opening import entries_of

entry = entries_of(Path(sys.argv[1]))[0]
backend = CpuBackend()
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
budget_bytes = backend.baseline_bytes() + (int(sys.argv[2]) << 20)
with backend.limited(budget_bytes):
    weight = torch.nn.Parameter(entry.mapped())
    print(weight.sum().item())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(()).expand_as(weight)
    for _ in range(2):
        try:
            optimizer.step()
        except MemoryError as error:
            print(type(error).__name__, error)
            break
    else:
        print(weight[0].item(), process.private_bytes() <= budget_bytes)
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "a"
    save_file({"w": torch.ones(24 << 20)}, path)  # 96 MiB
    return path


def outcome(weights, free_mib):
    command = [sys.executable, "-c", _PROGRAM, str(weights), str(free_mib)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_has_no_room_is_an_error_before_anything_is_written(weights):
    read, said = outcome(weights, 48)
    assert float(read) == 24 << 20  # reading uses none of the 48 MiB
    assert said.startswith("MemoryError out of memory: 96.0 MiB of weights that are mapped from a file")


def test_what_has_room_is_written_and_counts_once(weights):
    assert outcome(weights, 160)[1] == "-1.0 True"
