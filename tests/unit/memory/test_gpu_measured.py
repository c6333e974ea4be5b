"""The benchmark against measured GPUs, on one of its runs, with the installed library and thus less exactly.

The full check needs the records and transformers 4.51.3: ``python benchmarks/predict_gpu_measured.py --records ...``.
"""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MIB = 2**20


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import predict_gpu_measured

    return predict_gpu_measured


def run_of(benchmark, model, optimizer, batch_size, measured_bytes, rivals=None, is_oom=False):
    return benchmark.Run(
        model=model,
        optimizer=optimizer,
        batch_size=batch_size,
        gpu="NVIDIA GeForce RTX 3060",
        zero_grad=0,
        layout="montecarlo-old",
        capacity_bytes=12_622_168_064,
        measured_bytes=measured_bytes,
        is_oom=is_oom,
        rivals=rivals or {},
    )


def test_a_measured_run_is_predicted(benchmark):
    run = run_of(benchmark, "cerebras/Cerebras-GPT-111M", "SGD", 25, 5480 * MIB)

    answer = benchmark.predict(run, draw=0)

    assert not answer.is_oom
    assert answer.predicted_bytes / MIB == pytest.approx(5480, rel=0.05)  # another release has other model code


def test_small_batches_are_drawn_several_times_and_padded_to_their_longest(benchmark):
    small, large = (run_of(benchmark, "T5-small", "SGD", size, 1) for size in (5, 40))

    widths = {batch["input_ids"].shape[1] for draw in range(9) for batch in benchmark.make_batches(small, draw)}

    assert benchmark.number_of_draws(small) == 9
    assert benchmark.number_of_draws(large) == 0  # one text of 128 tokens is nearly always among them
    assert max(widths) == 128 > min(widths)


def test_figures_are_of_runs_that_fitted_and_count_wrong_verdicts(benchmark):
    fits, ooms = run_of(benchmark, "T5-small", "SGD", 5, 1000), run_of(benchmark, "T5-small", "SGD", 5, 1, is_oom=True)

    figures = benchmark.figures_of([(fits, 1010, False), (fits, 980, True), (ooms, 500, True), (ooms, 500, False)])

    assert figures == {
        "n": 2, "median": 0.015, "p90": 0.02, "max": 0.02, "ooms": 2, "false_fits": 1, "false_ooms": 1
    }  # fmt: skip
