"""The step of a job: what it takes over from the job."""

import torch
from torch import nn

from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_choice
from plimsoll.run.job_step import step_of, subject_of
from plimsoll.run.recover import samples_of_rank

WHOLE = [[micro_batch_choice(1)]]


def test_the_step_is_as_the_job_describes_it():
    fields = {
        "model": "lstm", "data": "nowhere.txt", "precision": "bf16", "steps": 10, "allow": "recut_batch_norm",
        "optimizer": {"name": "sgd", "clip_norm": 0.5, "schedule": "linear"},
    }  # fmt: skip
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = step_of(Job.from_fields(fields), model, optimizer, [[micro_batch_choice(3)]])
    workload = step.workload
    assert (workload.model, workload.optimizer, workload.units) == (model, optimizer, "next-tokens")
    assert (workload.precision, workload.clip_norm, step.micro_batch) == ("bf16", 0.5, 3)
    assert workload.schedule is not None
    own = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert step_of(Job.from_fields(fields), model, optimizer, WHOLE, schedule=own).workload.schedule is own


def test_a_precision_that_is_left_to_the_plan_never_reaches_autocast():
    job = Job.from_fields({"model": "lstm", "data": "nowhere.txt", "precision": "auto"})
    model = nn.Linear(2, 2)
    assert step_of(job, model, torch.optim.SGD(model.parameters()), WHOLE).workload.precision == "fp32"


def test_ranks_share_the_batch_and_the_first_has_most():
    job = Job.from_fields({"model": "lstm", "data": "nowhere.txt", "batch_size": 29, "ranks": 4})
    assert samples_of_rank(job) == 8
    assert subject_of(job, "fp32").endswith("29 x 256 tokens a step, fp32, shared by 4 ranks")
    assert samples_of_rank(Job.from_fields({"model": "lstm", "data": "nowhere.txt", "batch_size": 29})) == 29
