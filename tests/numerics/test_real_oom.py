"""Real out-of-memory errors: processes under an enforced limit in which the whole batch does not fit.

Each kind of model is trained under eight limits, from tight to generous, each in its own process (`real_oom.py`).
Memory is read from outside. The weights are compared with plain PyTorch in the same micro-batches without a limit.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from real_oom import CASES, NUM_STEPS

import plimsoll
from end_to_end.commands import PeakWatch
from plimsoll.device.cpu.data_limit import MARGIN_BYTES
from workloads import BATCH_SIZE, largest_relative_difference

CLOSE = 1e-5
TESTS = Path(__file__).parents[1]
WHOLE, ONE_BY_ONE = [BATCH_SIZE] * NUM_STEPS, [1] * NUM_STEPS
# Limits between the needs of single samples (0) and of the whole batch (1). 1.5 adds memory that the heap wastes.
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 1.5)
SCRATCH_BYTES = 48 << 20
"""What MKL and oneDNN want for themselves, however small the micro-batch; without it they fail at every size, and not
always with an error (an LSTM under a limit that leaves it 45 MiB ends with a segmentation fault in one of 20 runs)."""


@dataclass(frozen=True)
class Answer:
    """The results of a training process; `peak_bytes` is its peak in `num_readings` readings from outside."""

    facts: dict[str, Any]
    weights: dict[str, torch.Tensor]
    peak_bytes: int
    num_readings: int


def started(name: str, folder: Path) -> subprocess.Popen[str]:
    """Start the process that forks the trainings of one kind of model."""
    paths = os.pathsep.join(map(str, [Path(plimsoll.__file__).parents[1], TESTS]))
    # Two threads, because they are the likeliest to break a limit. They wait passively, as the machine may be busy.
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, TESTS / "numerics" / "real_oom.py", name, folder]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], folder: Path, kind: str, *numbers: int) -> Answer:
    """Run one training, which must neither fail nor be killed."""
    print(kind, *numbers, file=process.stdin, flush=True)
    pid = json.loads(process.stdout.readline())["pid"]
    with PeakWatch(pid).watching() as watch:
        facts = json.loads(process.stdout.readline())
        ended = json.loads(process.stdout.readline()) if "exit_code" not in facts else facts
    assert ended == {"exit_code": 0}
    return Answer(facts, torch.load(folder / f"{kind}.pt", weights_only=True), watch.peak_bytes, watch.num_readings)


# Each takes about a minute, so all but one are optional.
MARKED = [pytest.param(name, marks=[pytest.mark.slow] if name != "gpt2" else []) for name in CASES]


@pytest.mark.long
@pytest.mark.parametrize("name", MARKED)
def test_under_a_real_limit_training_is_the_plain_loop_cut_the_same_way(name, tmp_path):
    phases: list[list[str]] = []
    with started(name, tmp_path) as process:
        least_bytes = ask(process, tmp_path, "plain", *ONE_BY_ONE).facts["peak_bytes"]
        most_bytes = ask(process, tmp_path, "plain", *WHOLE).facts["peak_bytes"]
        assert most_bytes - least_bytes > 64 << 20
        learned = functools.cache(lambda *cuts: ask(process, tmp_path, "plain", *cuts).weights)
        for share in SHARES:
            budget_bytes = least_bytes + SCRATCH_BYTES + MARGIN_BYTES + round(share * (most_bytes - least_bytes))
            answer = ask(process, tmp_path, "limited", budget_bytes)
            cuts = answer.facts["cuts"]
            phases.append(answer.facts["phases"])
            print(f"{answer.peak_bytes >> 20} of {budget_bytes >> 20} MiB, {cuts}, {phases[-1]}")
            assert answer.facts["ledger"] == list(range(NUM_STEPS * BATCH_SIZE))
            assert largest_relative_difference(learned(*cuts), answer.weights) < CLOSE
            assert answer.num_readings > 10
            assert answer.peak_bytes <= budget_bytes
    assert process.returncode == 0
    assert phases[0]
    assert not phases[-1]
    # An LSTM allocates nearly all of its memory in one call of its forward pass.
    assert len({phase for found in phases for phase in found}) >= (1 if name == "lstm" else 2)
