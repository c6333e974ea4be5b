"""Code that depends on the processor's kernels and their threads, as on processors with fewer instructions.

oneDNN reads `ONEDNN_MAX_CPU_ISA` at its first use: AVX512_CORE has neither bfloat16 nor AMX, AVX2 no AVX-512.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DEPENDING = (
    "unit/device/cpu/test_device_cpu_lstm_kernels.py",
    "numerics/test_streams.py",
    "unit/memory/lowering/test_lowering_autocast.py",
    "unit/memory/lowering/test_lowering_cpu_scratch.py",
    "unit/memory/lowering/test_lowering_mkldnn_rnn.py",
    "unit/memory/lowering/test_lowering_packed_rnn.py",
    "unit/techniques/test_techniques_autocast.py",
    "unit/techniques/test_techniques_packed_stretches.py",
)

ON_TWO_THREADS = (
    "unit/device/cpu/test_device_cpu_lstm_kernels.py",
    "unit/memory/lowering/test_lowering_mkldnn_rnn.py",
    "unit/techniques/test_techniques_autocast.py",
)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("files", "differing"),
    [
        (DEPENDING, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
        (DEPENDING, {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
        (ON_TWO_THREADS, {"OMP_NUM_THREADS": "2"}),
    ],
    ids=["AVX512_CORE", "AVX2", "two-threads"],
)
def test_they_pass_on_another_processor(files: tuple[str, ...], differing: dict[str, str]):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=TESTS, env=environment | differing, capture_output=True, text=True)
    print(done.stdout[-4000:])
    assert done.returncode == 0
