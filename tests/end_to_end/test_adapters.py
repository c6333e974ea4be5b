"""Real out-of-memory errors at batch 5 of 8 in other libraries' loops: each of 64 samples is trained exactly once.

This is the use case of Hugging Face's `auto_find_batch_size`, which restarts and trains half of them twice.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold  # the limit is close to the memory of the process itself

PROGRAM = Path(__file__).parent.parent / "adapter_program.py"


def trained(adapter, kind, folder):
    result = folder / f"{kind}.json"
    command = [sys.executable, str(PROGRAM), adapter, kind, str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text())


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's memory is Linux's")
@pytest.mark.parametrize("adapter", ["accelerate", "lightning"])
def test_each_sample_counts_once_and_the_weights_are_those_of_an_undisturbed_run(adapter, tmp_path):
    undisturbed, limited = trained(adapter, "undisturbed", tmp_path), trained(adapter, "limited", tmp_path)
    assert undisturbed["num_ooms"] == 0
    assert limited["num_ooms"] > 0
    assert [len(numbers) for numbers in limited["passes"][:4]] == [8, 8, 8, 8]
    assert len(limited["passes"][4]) < 8
    assert sorted(number for numbers in limited["passes"] for number in numbers) == list(range(64))
    assert limited["num_steps"] == undisturbed["num_steps"] == 8
    assert limited["weights"] == pytest.approx(undisturbed["weights"], abs=1e-6)
