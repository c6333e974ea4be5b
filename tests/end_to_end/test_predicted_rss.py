"""The predicted memory of a CPU training against the memory of its process, read from outside."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from predict_cpu_rss import Case, Predictor, gpt2, measured_peak_bytes, recurrent

pytestmark = pytest.mark.cold  # the prediction covers the whole training process

TOLERANCE = 0.08
CASES = [
    Case("gpt2", gpt2(2, 128), (8, 128), vocab_size=8000),
    Case("lstm", recurrent("lstm", 2, 256), (16, 64), vocab_size=8000),
]


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="predicts glibc's heap")
@pytest.mark.parametrize(
    ("case", "is_limited", "num_runs"),
    [
        pytest.param(CASES[0], True, 1, marks=pytest.mark.slow),
        (CASES[0], False, 5),  # heap placement is random: single runs took 504 to 601 MiB
        (CASES[1], True, 1),
    ],
    ids=["gpt2 inside a budget", "gpt2 with glibc's own malloc", "lstm inside a budget"],
)
@pytest.mark.timeout(600)  # a busy machine is slow to start a training five times
def test_the_private_memory_of_a_training_is_predicted(case: Case, is_limited: bool, num_runs: int):
    predicted = Predictor().counted(case, is_limited).peak
    measured_bytes = median(measured_peak_bytes(case, is_limited) for _ in range(num_runs))
    assert predicted.likely_bytes == pytest.approx(measured_bytes, rel=TOLERANCE)
