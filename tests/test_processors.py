"""What depends on the kernels of the processor, as on processors with fewer instructions.

oneDNN reads `ONEDNN_MAX_CPU_ISA` when it is first used: AVX512_CORE has neither bfloat16 nor AMX, AVX2 no AVX-512.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DEPENDING = (
    "numerics/test_streams.py",
    "unit/memory/lowering/test_lowering_autocast.py",
    "unit/memory/lowering/test_lowering_cpu_scratch.py",
    "unit/memory/lowering/test_lowering_mkldnn_rnn.py",
    "unit/memory/lowering/test_lowering_packed_rnn.py",
    "unit/techniques/test_techniques_autocast.py",
    "unit/techniques/test_techniques_packed_stretches.py",
)


# Without bfloat16 in the processor oneDNN's LSTM takes 24 MiB more in this file's case than is predicted: still open.
NOT_PREDICTED = {"AVX512_CORE": {"unit/memory/lowering/test_lowering_cpu_scratch.py"}}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("instructions", ["AVX512_CORE", "AVX2"])
def test_they_pass_on_another_processor(instructions: str):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    files = [name for name in DEPENDING if name not in NOT_PREDICTED.get(instructions, ())]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=TESTS, env=environment | {"ONEDNN_MAX_CPU_ISA": instructions}, capture_output=True, text=True
    )
    print(done.stdout[-4000:])
    assert done.returncode == 0
