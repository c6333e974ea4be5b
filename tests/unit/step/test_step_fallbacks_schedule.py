"""The fallback schedule of a batch: from the fallbacks of a plan, or from its samples and the known limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import micro_batch_choice
from plimsoll.step.fallbacks import InstalledFallbacks, fallback_schedule_of
from plimsoll.step.recovery import FallbackSchedule

FALLBACKS = [(micro_batch_choice(8),), (micro_batch_choice(4),)]


def schedule_for(
    num_samples: int, before: FallbackSchedule | None = None, fallbacks: Any = (), **changes: Any
) -> FallbackSchedule:
    model = nn.Linear(1, 1)
    workload = Workload(model, torch.optim.SGD(model.parameters()), model_loss, "samples")
    usual = {"first_micro_batch": None, "grow_after": 2, "is_whole": False, "learned": None}
    return fallback_schedule_of(InstalledFallbacks(workload, fallbacks), before, num_samples, **(usual | changes))


def samples_in(fallback_schedule: FallbackSchedule) -> list[int]:
    return [size.samples for size in fallback_schedule.sizes]


def test_without_fallbacks_the_first_batch_makes_the_schedule_and_only_a_larger_one_replaces_it() -> None:
    fallback_schedule = schedule_for(12)
    assert samples_in(fallback_schedule) == [12, 6, 3, 2, 1]
    fallback_schedule.failed(0, 12, 120)
    for num_samples in (0, 5, 12):
        assert schedule_for(num_samples, before=fallback_schedule) is fallback_schedule
    larger = schedule_for(13, before=fallback_schedule)
    assert samples_in(larger) == [13, 7, 4, 2, 1]
    assert (larger.in_force, larger.choose(10)) == (0, 1)  # of 120 elements it knows that they are too many
    assert samples_in(schedule_for(0, first_micro_batch=4)) == [4, 2, 1]


@pytest.mark.parametrize("given", [{"first_micro_batch": 8}, {"fallbacks": FALLBACKS}])
def test_a_given_fallback_schedule_is_not_replaced_for_a_larger_batch(given: dict[str, Any]) -> None:
    fallback_schedule = schedule_for(2, **given)
    assert samples_in(fallback_schedule)[:2] == [8, 4]
    assert schedule_for(100, before=fallback_schedule, **given) is fallback_schedule


@pytest.mark.parametrize("fallbacks", [(), FALLBACKS])
@pytest.mark.parametrize(("is_whole", "following"), [(False, 1), (True, 0)])
def test_batches_that_must_stay_whole_have_no_smaller_passes(fallbacks: Any, is_whole: bool, following: int) -> None:
    fallback_schedule = schedule_for(8, fallbacks=fallbacks, is_whole=is_whole)
    assert fallback_schedule.failed(0, 8, 80) == following
    assert fallback_schedule.is_last(0) == is_whole


def test_a_small_batch_that_must_stay_whole_has_the_passes_of_the_plan_all_the_same() -> None:
    assert schedule_for(3, fallbacks=FALLBACKS, is_whole=True).is_last(0)


def test_what_a_checkpoint_has_learned_is_used_where_there_is_no_fallback_schedule_yet() -> None:
    learned = schedule_for(8)
    learned.failed(0, 8, 80)
    assert schedule_for(8, learned=learned.state_dict()).in_force == 1
    assert schedule_for(8, before=schedule_for(8), learned=learned.state_dict()).in_force == 0


def test_a_larger_pass_is_tried_after_as_many_clean_steps_as_is_said() -> None:
    fallback_schedule = schedule_for(8)
    fallback_schedule.failed(0, 8, 80)
    chosen = []
    for _ in range(3):
        chosen.append(fallback_schedule.choose(1))
        fallback_schedule.held(chosen[-1], 4)
    assert chosen == [1, 1, 0]
