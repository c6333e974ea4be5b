"""A plan for a model in a program of one's own, and the training that it is."""

import copy

import pytest
import torch
from torch import nn

from plimsoll.errors import InputError
from plimsoll.records.job import Job
from plimsoll.run.plan import plan_step
from plimsoll.run.step import TrainStep
from plimsoll.run.subjects import JobSubject, StepSubject
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


def subject_of_batch(batch, precision="fp32", units=None):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    return StepSubject(model, optimizer, batch, lambda model, batch: None, units, None, precision, frozenset())


TOKENS = {"input_ids": torch.zeros(3, 7, dtype=torch.long), "labels": torch.zeros(3, dtype=torch.long)}


@pytest.mark.parametrize(
    ("batch", "length", "varies"),
    [
        (TOKENS, 7, False),
        (TOKENS | {"attention_mask": torch.ones(3, 9)}, 9, True),
        (TOKENS | {"images": torch.zeros(3, 50, 2)}, 7, False),
        (torch.zeros(3, 4, 4), None, False),
        ((torch.zeros(3), "attention_mask"), None, False),
    ],
)
def test_a_batch_says_how_long_its_samples_are_and_whether_all_are(batch, length, varies):
    subject = subject_of_batch(batch)
    assert (subject.batch_size, subject.sequence_length, subject.lengths_vary) == (3, length, varies)
    assert (subject.num_ranks, subject.evaluates_between_steps) == (1, False)


@pytest.mark.parametrize(("precision", "own"), [("fp32", "fp32"), ("auto", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_a_precision_that_is_left_to_the_plan_is_full_where_none_is_chosen(precision, own):
    workload = subject_of_batch(TOKENS, precision).workload
    assert (workload.precision, workload.units) == (own, "samples")
    assert subject_of_batch(TOKENS, units="tokens").workload.units == "tokens"


@pytest.mark.parametrize(
    ("validation", "every", "evaluates"), [(0.1, 5, True), (0.1, None, False), (None, 5, False), (None, None, False)]
)
def test_a_job_evaluates_between_its_steps_where_it_has_what_to_evaluate_and_says_when(validation, every, evaluates):
    fields = {"model": "lstm", "sequence_length": 8, "batch_size": 4, "ranks": 2}
    data = {"train": "nowhere.txt", "validation": validation}
    subject = JobSubject(Job.from_fields(fields | {"data": data, "evaluate_every": every}))
    assert subject.evaluates_between_steps == evaluates
    assert (subject.batch_size, subject.num_ranks, subject.lengths_vary) == (2, 2, False)
