"""A plan for a model in a program of one's own, and the training that it is."""

import copy

import pytest
import torch

from plimsoll.errors import InputError
from plimsoll.run.plan import plan_step
from plimsoll.run.step import TrainStep
from workloads import CASES

CASE = next(case for case in CASES if case.name == "gpt2")
MIB = 1 << 20


def planned(budget, **options):
    model, optimizer = CASE.fresh()
    return plan_step(model, optimizer, CASE.batches()[0], units=CASE.units, budget=budget, device="cpu", **options)


def test_where_memory_is_plenty_nothing_is_changed_that_costs_time():
    plan = planned("4GiB")
    assert plan.fits
    assert plan.prediction.subject == "GPT2LMHeadModel, 8 samples a step, fp32"
    assert plan.rungs[0].micro_batch == 8
    assert plan.rungs[-1].micro_batch == 1


def test_the_step_runs_what_was_planned():
    plan = planned("4GiB", pins=["checkpointing=all", "micro_batch=4"])
    model, optimizer = CASE.fresh()
    plain = copy.deepcopy(model)
    step = TrainStep(model, optimizer, units=CASE.units, rungs=plan.choices_by_rung)
    result = step(CASE.batches()[0])
    assert result.micro_batch == 4
    step.close()
    assert set(vars(model.transformer.h[0])) == set(vars(plain.transformer.h[0]))


def test_the_model_is_not_changed_and_may_have_no_memory():
    model, optimizer = CASE.fresh()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan_step(model, optimizer, CASE.batches()[0], units=CASE.units, budget="4GiB", device="rtx3060")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    with torch.device("meta"):
        shapes = CASE.build().train()
    optimizer = torch.optim.AdamW(shapes.parameters())
    plan = plan_step(shapes, optimizer, CASE.batches()[0], units=CASE.units, budget="4GiB", device="rtx3060")
    assert plan.fits


def test_too_little_is_said_with_what_would_do():
    plan = planned(100 * MIB)
    assert not plan.fits
    assert plan.smallest_budget_bytes > 100 * MIB


def test_bad_wishes_are_refused_before_anything_is_traced():
    with pytest.raises(InputError, match="there is no technique `chekpointing`"):
        planned("4GiB", pins=["chekpointing=all"])
