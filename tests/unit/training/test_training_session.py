"""The session of a training: resuming, limits, refusals, messages and records."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll.training.loop
from plimsoll.errors import BudgetError, CheckpointError, FragmentedHeapError, OutOfMemoryError
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Configuration, Plan, micro_batch_choice
from plimsoll.records.run import RunHead, RunRecord, StartLine, StepLine
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.train_step import TrainStep
from plimsoll.training import checkpoint
from plimsoll.training.prepare import prepare_run
from plimsoll.training.run_directory import RunDirectory
from small_runs import make_run, small_job, train_here

NewRun = Callable[..., RunDirectory]


def steps_of(directory):
    return [line for line in directory.lines() if isinstance(line, StepLine)]


def test_the_first_fallback_is_the_plans_unless_another_is_given(new_run):
    first, second = new_run("a", steps=1), new_run("b", steps=1)
    train_here(first)
    train_here(second, fallback=2)
    assert [directory.fallback_in_force() for directory in (first, second)] == [0, 2]
    assert [steps_of(directory)[0].micro_batch for directory in (first, second)] == [8, 2]


def test_after_a_death_the_fallback_schedule_is_still_made_from_the_batch(new_run):
    """The run dies at 8 samples and resumes at 2. The next checkpoint stores how far the micro-batch may grow."""
    directory = new_run(steps=2)
    train_here(directory)
    directory.job.write_text(directory.job.read_text().replace("steps: 2", "steps: 56"))
    train_here(directory, resume_newest=True, fallback=2, too_large_fallback=0)
    assert [line.micro_batch for line in directory.lines() if isinstance(line, StartLine)] == [8, 2]
    assert [step.micro_batch for step in steps_of(directory)] == [8] * 2 + [2] * 50 + [4] * 4
    saved = checkpoint.load(directory.checkpoints, RunHead.load(directory.head).fingerprint)
    assert saved.progress["training_step"]["fallback_schedule"]["failed_elements"] == [
        8 * 2 * 32
    ]  # samples, tensors, tokens


def test_a_model_that_cannot_be_cut_stays_whole_after_a_death(new_run):
    model = nn.Sequential(nn.BatchNorm1d(1))
    step = TrainStep(
        model, torch.optim.SGD(model.parameters()), fallbacks=[[micro_batch_choice(8)], [micro_batch_choice(4)]]
    )
    step.begin_again_at(1)
    assert (step.micro_batch, step.fallback) == (8, 0)


def test_what_is_known_before_the_first_step_is_kept(new_run):
    directory = new_run(steps=1)
    train_here(directory)
    head = RunHead.load(directory.head)
    assert head.job["steps"] == 1
    assert head.device.kind == "cpu"
    assert {"torch", "plimsoll"} <= head.versions.keys()
    assert {"model.architecture", "seed", "data"} <= head.fingerprint.keys()


def test_how_far_gradients_of_streams_reach_is_said_and_kept(text, tmp_path, capsys):
    data = {"train": str(text), "order": "streams", "validation": 0.1}
    directory = make_run(tmp_path / "run", small_job(text, data=data, steps=2), tmp_path / "cache")
    prepare_run(directory.path, tmp_path / "cache", quiet=False)
    assert "gradients reach back 16.0 tokens on average, 31 at most" in capsys.readouterr().err
    train_here(directory)
    reach = RunRecord.from_directory(directory.path).gradient_reach
    assert reach.most_tokens == 31
    assert reach.mean_tokens == pytest.approx(16, abs=0.1)  # the last window is shorter


def test_a_checkpoint_of_another_job_is_refused_before_anything_is_trained(new_run):
    directory = new_run(steps=2)
    train_here(directory)
    lines = directory.lines()
    directory.job.write_text(directory.job.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(CheckpointError, match="seed was 0, is 1"):
        train_here(directory, resume=True)
    assert directory.lines() == lines


def test_a_budget_that_cannot_hold_the_model_is_refused_before_it_is_built(new_run):
    directory = new_run(model={"architecture": "lstm", "hidden_size": 20_000}, budget={"device": "1GiB"})
    with pytest.raises(BudgetError, match=r"a budget of 1\.0 GiB cannot hold this training"):
        train_here(directory)
    assert directory.lines() == []


def test_a_run_that_goes_on_counts_time_from_where_it_stopped(new_run):
    directory = new_run(steps=2)
    train_here(directory)
    stopped_seconds = directory.lines()[-2].time_seconds
    directory.job.write_text(directory.job.read_text().replace("steps: 2", "steps: 4"))
    train_here(directory, resume=True)
    starts = [line for line in directory.lines() if isinstance(line, StartLine)]
    assert starts[1].time_seconds >= stopped_seconds
    assert [step.step for step in steps_of(directory)] == [1, 2, 3, 4]


@pytest.mark.parametrize("has_supervisor", [True, False])
def test_memory_that_runs_out_between_steps_is_for_a_new_process(has_supervisor, new_run, monkeypatch):
    """An example is the writing of a line, where nothing can be undone. The new process resumes from a checkpoint."""
    monkeypatch.setattr(plimsoll.training.loop, "note_step", lambda *_: exhaust_memory())
    if has_supervisor:
        monkeypatch.setenv("PLIMSOLL_SUPERVISOR", str(os.getppid()))
    directory = new_run()
    with pytest.raises(OutOfMemoryError, match=r"outside of a step \(RuntimeError: .*DefaultCPUAllocator") as caught:
        train_here(directory)
    assert type(caught.value) is (FragmentedHeapError if has_supervisor else OutOfMemoryError)
    record = RunRecord.load(directory.record)
    assert (record.status, record.message) == ("failed", str(caught.value))


def test_failpoints_come_from_the_environment(new_run, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_FAILPOINTS", "backward@1")
    directory = new_run(steps=1)
    with armed("backward"):  # disarms the failpoints of the environment
        train_here(directory)
    assert steps_of(directory)[0].micro_batch == 4


def test_the_record_says_how_far_truncated_gradients_reach(new_run):
    """Windows have 32 tokens, of which 31 are inputs, in segments of 8."""
    directory = new_run(steps=2, model={"architecture": "gru"}, allow=["truncated_bptt"])
    choices = (micro_batch_choice(8), Choice(technique="truncated_bptt", options={"steps": 8}))
    Plan.load(directory.plan).model_copy(update={"fallbacks": (Configuration(choices=choices),)}).save(directory.plan)
    train_here(directory)
    reach = RunRecord.from_directory(directory.path).gradient_reach
    assert (reach.most_tokens, reach.mean_tokens) == (8, (3 * 36 + 28) / 31)


def test_a_plan_with_fewer_fallbacks_than_the_last_process_had_is_continued(new_run: NewRun) -> None:
    directory = new_run(steps=1)
    train_here(directory, fallback=3)
    directory.write_job(Job.from_yaml(directory.job, ("steps=2",)))
    plan = Plan.load(directory.plan)
    plan.model_copy(update={"fallbacks": plan.fallbacks[:2]}).save(directory.plan)
    train_here(directory, resume=True)
    assert directory.last_step() == 2


@pytest.mark.parametrize(
    ("budget", "is_limited"),
    [({}, False), ({"device": "4GiB"}, True), ({"host": "4GiB"}, False)],
    ids=["none", "device", "host of a GPU"],
)
def test_steps_are_done_inside_the_budget_of_the_device(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, budget: dict[str, str], is_limited: bool
) -> None:
    def note_limit(*args: Any) -> None:
        limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
        note_step(*args)

    limits: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_DATA)
    note_step = plimsoll.training.loop.note_step
    monkeypatch.setattr(plimsoll.training.loop, "note_step", note_limit)
    train_here(new_run(steps=1, budget=budget))
    assert [limit != before[0] for limit in limits] == [is_limited]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_what_is_trained_is_told_by_the_step_unless_it_is_quiet(
    new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(new_run("quiet", steps=1))
    assert capsys.readouterr().err == ""
    train_here(new_run("told", steps=1), quiet=False)
    *_, first, second = filter(None, capsys.readouterr().err.splitlines())  # first: a busy machine
    assert first.startswith("step 1/1 ")
    assert "tokens/s" in first
    assert second.startswith("step 1: validation loss ")


def test_a_classifier_is_timed_in_samples_and_says_how_many_texts_lost_their_end(
    new_run: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label, text in (("ham", "ship"), ("spam", "coin " * 40)):
        (tmp_path / "texts" / label).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "texts" / label / f"{number}.txt").write_text(f"{text} {number}")
    data = {"train": str(tmp_path / "texts"), "on_the_fly": True, "long_texts": "truncate", "workers": 0}
    train_here(new_run(task="classification", data=data, steps=1, tokenizer={"vocab_size": 270}), quiet=False)
    *_, first, second = filter(None, capsys.readouterr().err.splitlines())  # first: a busy machine
    assert "samples/s" in first
    assert second == "4 texts were truncated to 32 tokens as they were read"


def test_a_loss_over_all_of_a_sample_has_no_reach_to_tell(new_run: NewRun) -> None:
    directory = new_run(steps=1)
    train_here(directory)
    assert RunHead.load(directory.head).gradient_reach is None


def test_in_streams_truncated_gradients_reach_as_far_as_their_segments(text: Path, tmp_path: Path) -> None:
    data = {"train": str(text), "order": "streams", "validation": 0.1}
    directory = RunDirectory.create(tmp_path / "run", force=False)
    directory.write_job(small_job(text, data=data, model={"architecture": "gru"}, allow=["truncated_bptt"], steps=1))
    choices = (micro_batch_choice(8), Choice(technique="truncated_bptt", options={"steps": 8}))
    Plan(budget=Job.from_yaml(directory.job).budget, fallbacks=(Configuration(choices=choices),)).save(directory.plan)
    prepare_run(directory.path, tmp_path / "cache", quiet=True)
    train_here(directory)
    reach = RunHead.load(directory.head).gradient_reach
    assert reach is not None
    assert reach.most_tokens == 8
