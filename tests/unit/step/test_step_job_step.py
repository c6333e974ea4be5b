"""The step of a job, and the settings that it takes from the job."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.errors import InputError
from plimsoll.models.workload import model_loss
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_choice
from plimsoll.step.job_step import step_of, subject_of
from plimsoll.step.oom_boundary import Position
from plimsoll.step.recovery import samples_of_rank

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
    assert workload.full_length == 256
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


def test_what_is_given_takes_the_place_of_what_the_job_would_make():
    """A given loss (such as one with a teacher), position and backend replace the defaults of the job."""
    job = Job.from_fields({"model": "lstm", "data": "nowhere.txt", "sequence_length": 64})
    model, position = nn.Linear(2, 2), Position(step=7)
    optimizer = torch.optim.SGD(model.parameters())
    backend = backend_for("cpu")

    def with_teacher(model, batch):
        return model(batch).mean()

    step = step_of(job, model, optimizer, WHOLE, loss=with_teacher, backend=backend, position=position)
    assert (step.workload.loss, step.position, step.backend) == (with_teacher, position, backend)
    assert step.workload.full_length == 64
    assert step_of(job, model, optimizer, WHOLE).workload.loss is model_loss


@pytest.mark.parametrize(("allow", "cut"), [(["recut_batch_norm"], nullcontext()), ([], pytest.raises(InputError))])
def test_a_batch_is_cut_under_batch_norm_only_where_the_job_allows_it(allow, cut):
    job = Job.from_fields({"model": "lstm", "task": "classification", "data": "nowhere.txt", "allow": allow})
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fallbacks = [[micro_batch_choice(2)]]
    step = step_of(job, model, optimizer, fallbacks, loss=lambda model, batch: model(batch["x"]).square().mean())
    with cut:
        assert step({"x": torch.arange(12.0).reshape(4, 3)}).micro_batch == 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model": "lstm"}, "lstm, language-modeling, 29 x 256 tokens a step, bf16"),
        ({"model": {"architecture": "gru"}}, "gru, language-modeling, 29 x 256 tokens a step, bf16"),
        ({"model": {"function": "a.py:build"}}, "model, language-modeling, 29 x 256 tokens a step, bf16"),
        ({"model": "lstm", "ranks": 2}, "lstm, language-modeling, 29 x 256 tokens a step, bf16, shared by 2 ranks"),
    ],
)
def test_a_line_says_what_a_job_trains(fields, sentence):
    assert subject_of(Job.from_fields({"data": "nowhere.txt", "batch_size": 29} | fields), "bf16") == sentence
