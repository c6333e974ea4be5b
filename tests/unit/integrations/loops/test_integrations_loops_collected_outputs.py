"""Outputs collected off the device: they equal those in transformers' own container."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.trainer_pt_utils import EvalLoopContainer

from plimsoll.device import process
from plimsoll.device.cpu.data_limit import limited
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.integrations.loops.collected_outputs import Collected, concatenated, pool_for

CPU = torch.device("cpu")


def batches_of(kind: str) -> Iterator[Any]:
    """Return outputs of batches of 4, 4 and 2 samples."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((4, 5), (4, 7), (2, 6)):
        scores = torch.randn(rows, columns, 3, generator=generator)
        yield {
            "scores": scores,
            "one column count": scores[:, :5],
            "of each sample": scores[:, 0, 0],
            "a number": scores[0, 0, 0],
            "bf16": scores.bfloat16(),
            "transposed": scores.transpose(0, 1).contiguous().transpose(0, 1),
            "integers": (scores * 10).long(),
            "nested": (scores, {"a": scores[:, 0], "b": [scores]}),
            "unlike types": scores if rows == 4 else scores.double(),
        }[kind]


KINDS = [
    "scores", "one column count", "of each sample", "a number", "bf16", "transposed", "integers", "nested",
    "unlike types",
]  # fmt: skip


@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_files", [True, False])
def test_the_arrays_are_those_of_transformers(kind: str, is_joined: bool, in_files: bool):
    own = EvalLoopContainer(is_joined, padding_index=-100)
    ours = Collected(is_joined, padding_index=-100, pool=MappedPool() if in_files else None)
    for number, batch in enumerate(batches_of(kind)):
        own.add(batch)
        ours.add(batch)
        if number == 1:
            ours.to_cpu_and_numpy()
    expected, found = own.get_arrays(), ours.get_arrays()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert ours.get_arrays() is None


def test_nothing_that_was_added_is_nothing():
    assert Collected().get_arrays() is EvalLoopContainer().get_arrays() is None
    assert concatenated([None, None]) is None


PROGRAM = """
import torch
from plimsoll.device import process
from plimsoll.device.cpu.data_limit import limited
from plimsoll.integrations.loops.collected_outputs import Collected, pool_for

assert pool_for(torch.device("cpu")) is None
before_bytes = process.private_memory().private_bytes
with limited(before_bytes + (64 << 20)):
    collected = Collected(pool=pool_for(torch.device("cpu")))
    for _ in range(32):
        collected.add(torch.ones(1 << 20))
    array = collected.get_arrays()
    assert array.nbytes == 128 << 20
    assert process.private_memory().private_bytes - before_bytes < array.nbytes / 2
    array += 1  # as a function of metrics may
assert array.min() == array.max() == 2
"""


def test_inside_a_limit_what_is_collected_takes_none_of_it():
    """It runs in a separate process, because free heap memory of earlier tests would count."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_where_every_folder_is_kept_in_memory_so_is_what_is_collected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLIMSOLL_SCRATCH", "/dev/shm")
    with limited(process.private_memory().private_bytes + (64 << 20)):
        assert pool_for(CPU) is None
