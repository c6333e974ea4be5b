"""The plan of a run: given, made, reused and made again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll.data.quick_facts import sketch_texts
from plimsoll.errors import BudgetError, CheckpointError, InputError
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.planning.plan_validity import facts_of
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import Configuration, Plan, Trial, micro_batch_choice, micro_batch_plan
from plimsoll.training.plan import plan_run
from plimsoll.training.prepare import prepare_run
from plimsoll.training.run_directory import RunDirectory
from small_runs import small_job, train_here

NewRun = Callable[..., RunDirectory]


def plan_again(directory, quiet=True, keep=True):
    plan_run(directory.path, None, (), (), quiet, goes_on=True, keep=keep)


@pytest.fixture
def planned_run(new_run):
    """Return a run of 2 steps with a plan that was made for its budget of 1 GiB. No machine has the other budgets."""
    directory = new_run(steps=2, budget={"device": "4GiB"})  # the budget of this process, which runs many tests
    job = Job.from_yaml(directory.job)
    facts = facts_of(job, sketch_texts(job), CpuLowering().name)
    made = Plan.load(directory.plan).model_copy(update={"made_for": facts, "limit_bytes": 4 << 30})
    made.save(directory.plan)
    train_here(directory)
    return directory


def too_much(directory):
    """Give a run a budget that no machine has; only making a plan refuses it."""
    job = Job.from_yaml(directory.job)
    directory.write_job(job.model_copy(update={"budget": Budget(device_bytes=1 << 52)}))
    return pytest.raises(BudgetError, match=r"a budget of 4\.0 PiB is more than")


def test_a_run_that_goes_on_keeps_its_plan_and_of_other_code_or_for_another_budget_makes_it_again(planned_run, capsys):
    plan_again(planned_run)
    plan = Plan.load(planned_run.plan)
    with too_much(planned_run):
        plan_again(planned_run, keep=False)
    plan.model_copy(update={"made_for": plan.made_for | {"torch": "1.0"}}).save(planned_run.plan)
    with too_much(planned_run):
        plan_again(planned_run, quiet=False)
    assert "the plan of this run no longer holds: torch was 1.0, is " in capsys.readouterr().err
    plan.model_copy(update={"budget": Budget(device_bytes=1 << 53)}).save(planned_run.plan)
    with too_much(planned_run):
        plan_again(planned_run, quiet=False)
    assert "no longer holds: the budget was 8.0 PiB, is 4.0 PiB; planning again" in capsys.readouterr().err
    plan.save(planned_run.plan)
    plan_again(planned_run)  # with less free memory than now
    assert Plan.load(planned_run.plan) == plan


def test_a_checkpoint_is_looked_for_before_a_plan_is_made(planned_run):
    with too_much(planned_run):
        plan_again(planned_run, keep=False)
    shutil.rmtree(planned_run.checkpoints)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        plan_again(planned_run, keep=False)


def test_a_plan_is_of_what_was_prepared_also_one_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job asks for 8,000 tokens, but its text has only 261, which is known after reading it."""
    monkeypatch.setattr("plimsoll.data.quick_facts.FEW_BYTES", 0)
    (tmp_path / "text.txt").write_text("word " * 800)
    job = small_job(tmp_path / "text.txt", tokenizer={}, budget={"device": "2GiB"})
    directory = RunDirectory.create(tmp_path / "run", force=False)
    directory.write_job(job)
    given = micro_batch_plan(job.budget, (8,))
    for vocabulary, longest in (("8000", "32"), ("261", "8")):
        made_for = {"vocabulary": vocabulary, "labels": "None", "tokens of the longest row": longest}
        given.model_copy(update={"made_for": made_for}).save(directory.plan)
        with pytest.raises(InputError, match="leave --plan out"):
            prepare_run(directory.path, tmp_path / "cache", quiet=True)
        assert not directory.prepared.exists()
    given.save(directory.plan)
    prepare_run(directory.path, tmp_path / "cache", quiet=True, pins=("chunked_loss",))
    with pytest.raises(InputError, match="has 261 outputs"):
        plan_run(directory.path, None, ("chunked_loss",), (), quiet=True)


def given_plan(directory: RunDirectory, path: Path) -> Plan:
    """Write a plan with two fallbacks for the job of a run, under a budget that the job does not set."""
    job = Job.from_yaml(directory.job)
    fallbacks = tuple(Configuration(choices=(micro_batch_choice(size),)) for size in (4, 2))
    changes = {"made_for": facts_of(job, sketch_texts(job), CpuLowering().name), "fallbacks": fallbacks}
    plan = Plan.load(directory.plan).model_copy(update=changes)
    plan.save(path)
    return plan


@pytest.mark.parametrize("quiet", [True, False])
def test_a_plan_that_is_given_is_kept_and_its_first_configuration_printed(
    new_run: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    directory = new_run()
    plan = given_plan(directory, tmp_path / "plan.json")
    plan_run(directory.path, tmp_path / "plan.json", (), (), quiet)
    assert Plan.load(directory.plan) == plan
    plan.model_copy(update={"trial": Trial(seconds=6.5)}).save(tmp_path / "tried.json")
    plan_run(directory.path, tmp_path / "tried.json", (), (), quiet=True)
    assert Plan.load(directory.plan).trial.left_out
    said = "plan: micro_batch=4. Not predicted: training takes a fallback when memory runs out.\n"
    assert capsys.readouterr().err == ("" if quiet else said)
    with pytest.raises(CheckpointError):
        plan_run(directory.path, tmp_path / "plan.json", (), (), quiet, goes_on=True)


def test_a_plan_that_still_holds_is_kept_without_a_word(new_run: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    directory = new_run(steps=1)
    plan = given_plan(directory, directory.plan)
    train_here(directory)
    plan_run(directory.path, None, (), (), quiet=False, goes_on=True, keep=True)
    assert Plan.load(directory.plan) == plan
    assert capsys.readouterr().err == ""
