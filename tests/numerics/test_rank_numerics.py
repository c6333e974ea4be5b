"""Several ranks against one process on the same batches: losses, weights, evaluation and out-of-memory errors.

The model has a layer that only some samples reach, and the last batch has fewer samples than there are ranks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ranks_program import BATCH_SAMPLES, NUM_STEPS, Windows, random_case
from tests.ranks_started import run_cases

TOLERANCE = 1e-5
CASES_IN_CI = {2: 8, 3: 3, 4: 2}
CASES = 200


def assert_alike(one: dict[str, Any], other: dict[str, Any], case: dict[str, Any]) -> None:
    for name in ("losses", "weights", "evaluation"):
        np.testing.assert_allclose(one[name], other[name], atol=TOLERANCE, rtol=0, err_msg=f"{name} of {case}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[float | None, dict[str, Any]]:
    """Return the results of one process, with and without clipping."""
    cases = [{"clip_norm": norm} for norm in (None, 1.0)]
    (found,) = run_cases(tmp_path_factory.mktemp("alone"), 1, cases, seconds=60)
    return {case["clip_norm"]: one for case, one in zip(cases, found, strict=True)}


def check(folder: Path, world_size: int, seeds: range, alone: dict[float | None, dict[str, Any]]) -> None:
    undisturbed = [{"clip_norm": norm} for norm in alone]
    cases = [*undisturbed, *(random_case(seed, world_size) for seed in seeds)]
    of_ranks = run_cases(folder, world_size, cases, seconds=60 + 2 * len(cases))
    num_events = 0
    for case, *found in zip(cases, *of_ranks, strict=True):
        for one in found:
            assert_alike(one, alone[case["clip_norm"]], case)
            assert one["samples"] == [BATCH_SAMPLES] * (NUM_STEPS - 1) + [2]
            # All ranks take the same action after an error on one of them.
            assert [event for event in one["events"] if event[1] is not None] == [
                event for event in found[0]["events"] if event[1] is not None
            ]
        num_events += len(found[0]["events"])
    assert num_events >= len(seeds) // 2  # most cases do run out of memory


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_train_what_one_process_trains_whatever_runs_out_of_memory_where(tmp_path, alone, world_size):
    check(tmp_path, world_size, range(CASES_IN_CI[world_size]), alone)


def test_ranks_evaluate_the_windows_of_a_text_collectively(tmp_path):
    """Three of four texts are right by most of their windows. The third has label 1, and two windows vote for 0."""
    failing: list[tuple[int, ...]] = [(), (1,), (2,)]
    cases: list[dict[str, Any]] = [{"failing": passages, "rank": len(passages)} for passages in failing]
    num_right = 7  # windows 1, 2, 3, 4, 6, 9 and 10; logits are 1 for the answer and 0 for the two others
    mean_loss = math.log(math.e + 2) - num_right / Windows.num_samples
    for found in run_cases(tmp_path, 3, cases, seconds=60):
        for one in found:
            assert (one["samples"], one["accuracy"]) == (Windows.num_samples, 0.75)
            assert one["loss"] == pytest.approx(mean_loss, abs=1e-6)


@pytest.mark.long
def test_a_limit_on_one_rank_cuts_the_step_of_all(tmp_path):
    """Memory really runs out: the allocator of one rank cannot hold its whole part of the batch."""
    case = {"wide": True, "limited_rank": 1}
    (alone,) = run_cases(tmp_path / "alone", 1, [{"wide": True}], seconds=60)
    of_ranks = run_cases(tmp_path / "ranks", 2, [case], seconds=60)
    for (found,) in of_ranks:
        assert_alike(found, alone[0], case)
    (events,) = {str(found[0]["events"]) for found in of_ranks}
    assert events.startswith("[['forward', 1, 'micro-batch 4 -> 2']") or "backward" in events


@pytest.mark.long
def test_a_loss_that_ranks_would_change_is_refused_on_all_of_them_and_an_additive_one_is_that_of_one_process(tmp_path):
    """A step over ranks splits the batch even if memory does not run out."""
    pairs = [("contrastive", "samples"), ("weighted", "samples"), ("weighted", "weights")]
    cases: list[dict[str, Any]] = [{"own_loss": loss, "units": units} for loss, units in pairs]
    (alone,) = run_cases(tmp_path / "alone", 1, cases, seconds=60)
    first, second = run_cases(tmp_path / "ranks", 2, cases, seconds=60)
    assert not any(one["refused"] or one["not_evaluated"] for one in (*alone, first[2], second[2]))
    for one, other in zip(first[:2], second[:2], strict=True):
        assert one["refused"] == other["refused"] == one["not_evaluated"] == other["not_evaluated"]
        assert (one["losses"], one["is_as_before"], other["is_as_before"]) == ([], True, True)
    assert "2 ranks would each have a part of the batch, but the loss of a batch is not the sum" in first[0]["refused"]
    assert "averages over the weights of the labels, and not over samples" in first[1]["refused"]
    for one in (first[2], second[2]):
        for name in ("losses", "weights"):
            np.testing.assert_allclose(one[name], alone[2][name], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_hundred_ways_to_run_out_of_memory(tmp_path, alone, world_size):
    check(tmp_path, world_size, range(1000, 1000 + CASES), alone)
