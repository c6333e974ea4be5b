"""A model shared out over ranks against one process: through lack of memory, and from checkpoint to checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ranks_program import BATCH_SAMPLES, NUM_STEPS, random_case
from tests.ranks_started import run_cases

TOLERANCE = 1e-5
CASES_IN_CI = {2: 6, 3: 2, 4: 1}
CASES = 200
GATHERED = ("once", "twice")
NORMS = (None, 1.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[float | None, dict[str, Any]]:
    """What one process makes of it, with and without clipping."""
    cases = [{"clip_norm": norm, "gathered": None} for norm in NORMS]
    (found,) = run_cases(tmp_path_factory.mktemp("alone"), 1, cases, seconds=60)
    return dict(zip(NORMS, found, strict=True))


def check(folder: Path, world_size: int, seeds: range, alone: dict[float | None, dict[str, Any]]) -> None:
    undisturbed = [{"clip_norm": norm, "gathered": gathered} for norm in NORMS for gathered in GATHERED]
    cases = [*undisturbed, *(random_case(seed, world_size) | {"gathered": GATHERED[seed % 2]} for seed in seeds)]
    of_ranks = run_cases(folder, world_size, cases, seconds=60 + 5 * len(cases))
    num_events = 0
    for case, *found in zip(cases, *of_ranks, strict=True):
        for one in found:
            for name in ("losses", "weights", "evaluation"):
                expected = alone[case["clip_norm"]][name]
                np.testing.assert_allclose(one[name], expected, atol=TOLERANCE, rtol=0, err_msg=f"{name} of {case}")
            assert one["samples"] == [BATCH_SAMPLES] * (NUM_STEPS - 1) + [2]
        num_events += len(found[0]["events"])
    assert num_events >= len(seeds) // 2  # most cases do run out of memory


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_shards_train_what_one_process_trains_whatever_runs_out_of_memory_where(tmp_path, alone, world_size):
    check(tmp_path, world_size, range(CASES_IN_CI[world_size]), alone)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_hundred_ways_to_run_out_of_memory_in_shards(tmp_path, alone, world_size):
    check(tmp_path, world_size, range(1000, 1000 + CASES), alone)


@pytest.mark.slow  # `tests/unit/run/test_run_checkpoint_sharded.py` has parts of it
def test_a_checkpoint_of_four_ranks_goes_on_with_two_three_one_and_two(tmp_path):
    """The last of the four is of one process that has the whole model."""
    expected = weights_of(tmp_path / "alone", 1, None, 5)
    root = tmp_path / "shared"
    for until, (world_size, gathered) in enumerate([(4, "twice"), (2, "once"), (3, "twice"), (1, None)], start=1):
        found = weights_of(root, world_size, gathered, until)
    found = weights_of(root, 2, "once", 5)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    assert sorted(one.name for one in root.glob("*step-*")) == ["step-00000004", "step-00000005"]


def weights_of(root: Path, world_size: int, gathered: str | None, until: int) -> list[float]:
    case = {"root": str(root), "gathered": gathered, "until": until}
    of_ranks = run_cases(root.with_name(f"{root.name}-{until}"), world_size, [case], 60, program="shards_program")
    for found in of_ranks:
        np.testing.assert_array_equal(found[0], of_ranks[0][0])
    weights: list[float] = of_ranks[0][0]
    return weights


def test_a_checkpoint_for_which_one_rank_has_no_memory_is_written_by_none_and_can_be_written_again(tmp_path):
    case = {"root": str(tmp_path / "root"), "until": 1, "gathered": "twice", "clip_norm": None, "short_of_memory": 1}
    (_, others) = run_cases(tmp_path / "ranks", 2, [case], seconds=60, program="shards_program")
    assert others  # both have ended
    assert [one.name for one in (tmp_path / "root").iterdir()] == ["step-00000001"]
