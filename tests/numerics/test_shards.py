"""A model sharded over ranks against one process: out-of-memory errors, and checkpoints for other numbers of ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ranks_program import BATCH_SAMPLES, NUM_STEPS, random_shards_case
from tests.ranks_started import run_cases

TOLERANCE = 1e-5
HALF_TOLERANCE = 2e-2
CASES_IN_CI = {2: 4, 3: 2, 4: 1}
CASES = 200
GATHERED = ("once", "twice")
NORMS = (None, 1.0)
TWICE = {"clip_norm": 1.0, "gathered": "twice"}
DISK = TWICE | {"offload": "disk"}


def facts_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields of a case that determine its results, for any number of ranks."""
    return case["clip_norm"], case.get("is_mixed", False), case.get("is_first_small", False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the results of one process for each model and first batch, with and without clipping."""
    cases = [
        {"clip_norm": norm, "is_mixed": is_mixed, "is_first_small": is_first_small, "gathered": None}
        for norm, is_mixed, is_first_small in product(NORMS, (False, True), (False, True))
    ]
    (found,) = run_cases(tmp_path_factory.mktemp("alone"), 1, cases, seconds=60)
    return {facts_of(case): one for case, one in zip(cases, found, strict=True)}


def require_alike(one: dict[str, Any], expected: dict[str, Any], case: dict[str, Any], tolerance: float) -> None:
    for name in ("losses", "weights", "evaluation"):
        np.testing.assert_allclose(one[name], expected[name], atol=tolerance, rtol=0, err_msg=f"{name} of {case}")
    first = 1 if case.get("is_first_small") else BATCH_SAMPLES
    assert one["samples"] == [first, *[BATCH_SAMPLES] * (NUM_STEPS - 2), 2]


def check(folder: Path, world_size: int, seeds: range, alone: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    undisturbed = [{"clip_norm": norm, "gathered": gathered} for norm in NORMS for gathered in GATHERED]
    undisturbed += [DISK | {"is_mixed": True, "is_first_small": True}, TWICE | {"offload": "host"}]
    cases = [*undisturbed, *(random_shards_case(seed, world_size) for seed in seeds)]
    of_ranks = run_cases(folder, world_size, cases, seconds=60 + 10 * len(cases))
    num_events = 0
    for case, *found in zip(cases, *of_ranks, strict=True):
        for one in found:
            require_alike(one, alone[facts_of(case)], case, TOLERANCE)
        num_events += len(found[0]["events"])
    assert num_events >= len(seeds) // 2  # most cases do run out of memory


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (3, 4))])
def test_shards_train_what_one_process_trains_whatever_runs_out_of_memory_where(tmp_path, alone, world_size):
    check(tmp_path, world_size, range(CASES_IN_CI[world_size]), alone)


@pytest.mark.long
@pytest.mark.parametrize("options", [TWICE, DISK], ids=["ram", "disk"])
def test_a_limit_on_one_rank_cuts_the_step_of_all_in_shards(tmp_path, options):
    """Memory really runs out between the communication of two blocks."""
    case = options | {"wide": True, "limited_rank": 1}
    (alone,) = run_cases(tmp_path / "alone", 1, [options | {"wide": True, "gathered": None}], seconds=60)
    of_ranks = run_cases(tmp_path / "ranks", 2, [case], seconds=60)
    for (found,) in of_ranks:
        require_alike(found, alone[0], case, TOLERANCE)
        assert found["events"][0][1:] == [1, "micro-batch 4 -> 2"]
        assert found["events"] == of_ranks[0][0]["events"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_hundred_ways_to_run_out_of_memory_in_shards(tmp_path, alone, world_size):
    check(tmp_path, world_size, range(1000, 1000 + CASES), alone)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_half_precision_is_that_of_a_copy_of_the_weights_and_a_scaler_skips_on_all_ranks_or_on_none(
    tmp_path, world_size
):
    """bf16 equals plain PyTorch with the same casts, up to rounding. fp16 equals PyTorch's autocast."""
    mixed = {"is_mixed": True, "is_first_small": True}
    scaled = {"gathered": None, "clip_norm": 1.0, "precision": "fp16", "infinite": [2, 0]}
    plain = [{"half_for": world_size, "clip_norm": 1.0}, {"half_for": world_size, "clip_norm": 1.0} | mixed, scaled]
    ((half, half_of_mixed, with_scaler),) = run_cases(tmp_path / "alone", 1, plain, seconds=60)
    bf16 = {"precision": "bf16", "dtype": "bf16"}
    failures = [[0, "backward", 4], [1, "clip", 3], [1, "optimizer", 2]]
    exact = [(TWICE | bf16, half), (DISK | bf16 | {"gathered": "once"}, half), (DISK | bf16 | mixed, half_of_mixed)]
    skipping = [TWICE | {"precision": "fp16", "infinite": [2, rank]} for rank in range(world_size)]
    rounded = [
        (TWICE | bf16 | {"failures": failures}, half),
        (DISK | {"precision": "fp16", "dtype": "fp16", "infinite": [2, 1]}, with_scaler),
        (TWICE | {"precision": "fp16", "infinite": [2, 1], "failures": failures}, with_scaler),
        *((case, with_scaler) for case in skipping),
    ]
    cases = [case for case, _ in (*exact, *rounded)]
    for of_rank in run_cases(tmp_path / "ranks", world_size, cases, seconds=60 + 10 * len(cases)):
        for found, (case, expected) in zip(of_rank, (*exact, *rounded), strict=True):
            tolerance = TOLERANCE if (case, expected) in exact else HALF_TOLERANCE
            require_alike(found, expected, case, tolerance)
        assert all(
            one["weights"] == of_rank[-1]["weights"] for one in of_rank[-world_size:]
        )  # an infinite gradient on any rank


def test_ranks_that_differ_all_fail_and_a_model_that_cannot_be_assembled_is_written_by_none(tmp_path):
    """On one rank, samples do not reach a block or a parameter, or memory runs out at the end."""
    cases = [
        TWICE | {"skipped": "block"},
        TWICE | {"skipped": "parameter"},
        TWICE | {"short_at_end": 1},
        DISK | {"short_at_end": 0},
    ]
    of_ranks = run_cases(tmp_path, 2, cases, seconds=60, program="shards_ends_program")
    for case, *found in zip(cases, *of_ranks, strict=True):
        expected = "InputError: the 2 ranks are in different blocks" if "skipped" in case else "OutOfMemoryError"
        assert all(one.startswith(expected) for one in found), (case, found)


@pytest.mark.slow  # `tests/unit/training/test_training_sharded_checkpoint.py` tests parts of it
def test_a_checkpoint_of_four_ranks_goes_on_with_two_three_one_and_two(tmp_path):
    """The last of the four checkpoints is from one process with the whole model."""
    expected = weights_of(tmp_path / "alone", 1, None, 5)
    root = tmp_path / "shared"
    for until, (world_size, gathered) in enumerate([(4, "twice"), (2, "once"), (3, "twice"), (1, None)], start=1):
        found = weights_of(root, world_size, gathered, until, {"offload": "disk"} if world_size < 4 else {})
    found = weights_of(root, 2, "once", 5)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    assert sorted(one.name for one in root.glob("*step-*")) == ["step-00000004", "step-00000005"]


def weights_of(
    root: Path, world_size: int, gathered: str | None, until: int, options: dict[str, str] | None = None
) -> list[float]:
    case = {"root": str(root), "gathered": gathered, "until": until} | (options or {})
    of_ranks = run_cases(root.with_name(f"{root.name}-{until}"), world_size, [case], 60, program="shards_program")
    for found in of_ranks:
        np.testing.assert_array_equal(found[0], of_ranks[0][0])
    weights: list[float] = of_ranks[0][0]
    return weights


def test_a_checkpoint_for_which_one_rank_has_no_memory_is_written_by_none_and_can_be_written_again(tmp_path):
    case = {"root": str(tmp_path / "root"), "until": 1, "gathered": "twice", "clip_norm": None, "short_of_memory": 1}
    (_, others) = run_cases(tmp_path / "ranks", 2, [case], seconds=60, program="shards_program")
    assert others  # both processes have ended
    assert [one.name for one in (tmp_path / "root").iterdir()] == ["step-00000001"]
