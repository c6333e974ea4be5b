"""Plans as files and as constraints of the command line: a run follows its plan exactly, or reports an error.

Refusals are in tests/golden/errors, as in `test_bad_input`, and leave nothing behind that a second attempt would fail
on.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from end_to_end.commands import (
    CORPUS,
    LONGEST_SECONDS,
    assert_each_sample_once,
    assert_same_bits,
    finish,
    learned,
    plimsoll,
    start,
    steps_of,
    trained,
    wait_until,
    write_job,
)
from end_to_end.test_bad_input import refused, tiny_job, without_machine
from plimsoll.device.cpu.data_limit import MARGIN_BYTES
from plimsoll.records.plan import Plan
from plimsoll.records.run import RunRecord

BUDGET = "600MiB"
DIFFERS = re.compile(r"(?<=--budget )\d+(?=MiB)|(?<=budget=\")\d+(?=MiB)")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job and `plan.json`: three samples at a time, and states in a file."""
    folder = tmp_path_factory.mktemp("planned")
    job = tiny_job(folder)
    pins = ("--pin", "micro_batch=3", "--pin", "optimizer_offload")
    done = plimsoll("plan", job, "--budget", BUDGET, *pins, "-o", folder / "plan.json")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def planned_run(planned: Path) -> Path:
    """Train two steps with the plan."""
    arguments = ("--plan", planned / "plan.json", "--set", "steps=2", "--cache", planned / "cache")
    trained(planned / "job.yaml", "--out", planned / "run", *arguments)
    return planned / "run"


def test_a_run_is_exactly_the_plan_it_is_given(planned, planned_run):
    plan = Plan.load(planned / "plan.json")
    assert {"micro_batch=3", "optimizer_offload=disk"} <= set(map(str, plan.choices))
    ran = Plan.load(planned_run / "plan.json")
    assert "2 steps" in ran.trial.left_out  # too few for trials of other plans
    assert ran == plan.model_copy(update={"trial": ran.trial, "candidates": ()})
    record = RunRecord.from_directory(planned_run)
    assert [(step.fallback, step.micro_batch) for step in record.steps] == [(0, 3)] * 2
    assert record.limit_bytes == 600 << 20  # the limit of the plan: the job has none
    assert not record.oom_events


@pytest.mark.slow
def test_a_planned_run_goes_on_as_it_was_and_under_another_budget_plans_again(planned, planned_run, tmp_path):
    run = shutil.copytree(planned_run, tmp_path / "run")
    trained("--resume", "--out", run, "--set", "steps=3")
    assert (run / "plan.json").read_bytes() == (planned_run / "plan.json").read_bytes()
    done = trained("--resume", "--out", run, "--set", "steps=4", "--budget", "500MiB")
    assert "plan: micro_batch=3 + optimizer_offload=disk" in done.stderr
    before, after = Plan.load(planned_run / "plan.json"), Plan.load(run / "plan.json")
    assert (after.budget.device_bytes, after.limit_bytes) == (500 << 20, (500 - 16) << 20)
    assert after.pinned == before.pinned
    assert [step.micro_batch for step in steps_of(run)] == [3] * 4
    assert_each_sample_once(steps_of(run), 4)
    whole = tmp_path / "whole"
    trained(planned / "job.yaml", "--out", whole, "--no-plan", "--cache", planned / "cache")
    assert [step.loss for step in steps_of(run)] == pytest.approx([step.loss for step in steps_of(whole)], rel=1e-5)


@pytest.mark.slow
def test_a_run_whose_plan_is_torn_plans_again_and_goes_on(planned, planned_run, tmp_path):
    run = shutil.copytree(planned_run, tmp_path / "run")
    (run / "plan.json").write_text('{"record": "pl', "utf-8")
    done = trained("--resume", "--out", run, "--set", "steps=3", "--budget", BUDGET)
    told = f"{run / 'plan.json'} cannot be read: planning again, without what the first plan had pinned or forbidden"
    assert told in done.stderr
    assert Plan.load(run / "plan.json").budget.device_bytes == 600 << 20
    assert_each_sample_once(steps_of(run), 3)


@pytest.mark.slow
def test_a_run_with_moments_of_few_bits_goes_on_bit_for_bit(tmp_path):
    """The weight has 300 x 16 numbers, and the moments of biases stay in full precision."""
    job = tiny_job(tmp_path, allow="low_bit_optimizer")
    plan = tmp_path / "plan.json"
    planned = plimsoll("plan", job, "--budget", BUDGET, "--pin", "low_bit_optimizer=4", "-o", plan)
    assert planned.returncode == 0, planned.stderr
    given = ("--plan", plan, "--cache", tmp_path / "cache")
    trained(job, "--out", tmp_path / "whole", *given)
    trained(job, "--out", tmp_path / "run", *given, "--set", "steps=3")
    trained("--resume", "--out", tmp_path / "run", "--set", "steps=4")
    whole, found = learned(tmp_path / "whole"), learned(tmp_path / "run")
    assert {str(tensor.dtype) for name, tensor in whole.items() if name.endswith("exp_avg_codes")} == {"torch.uint8"}
    assert_same_bits(whole, found)
    assert [step.loss for step in steps_of(tmp_path / "run")] == [step.loss for step in steps_of(tmp_path / "whole")]


@pytest.mark.slow
def test_a_resume_under_a_budget_that_cannot_be_changes_nothing(planned_run, golden, tmp_path):
    run = shutil.copytree(planned_run, tmp_path / "run")
    message = refused("--resume", "--out", run, "--set", "steps=4", "--budget", "140MiB")
    golden("errors/budget-planned.txt", told(message, tmp_path))
    assert files_of(run) == files_of(planned_run)


def at_the_baseline(process: subprocess.Popen[str]) -> psutil.Process:
    """Return the process that the planner forks to measure the baseline, once it runs."""
    found: list[psutil.Process] = []

    def look() -> bool:
        with contextlib.suppress(psutil.Error):
            command = psutil.Process(process.pid)
            planners = [one for one in (command, *command.children()) if {"plan", "plan-worker"} & {*one.cmdline()}]
            found.extend(child for planner in planners for child in planner.children())
        return bool(found)

    wait_until(look, process)
    return found[0]


def test_ctrl_c_while_planning_says_so_and_leaves_nothing_behind(planned, tmp_path):
    process = start("plan", planned / "job.yaml", "--budget", BUDGET, "-o", tmp_path / "plan.json")
    baseline = at_the_baseline(process)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == ("planning was stopped before it had a result: run the same command again\n")
    assert list(tmp_path.iterdir()) == []
    baseline.wait(LONGEST_SECONDS)  # it ends by itself


def files_of(run: Path) -> dict[str, bytes]:
    """Return the contents of all files except the name of the last process of the run."""
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != ".plimsoll"}


def test_ctrl_c_while_a_resume_plans_again_changes_nothing(planned_run, tmp_path):
    run = shutil.copytree(planned_run, tmp_path / "run")
    process = start("train", "--resume", "--out", run, "--set", "steps=3", "--budget", "500MiB")
    baseline = at_the_baseline(process)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == (
        f"the process that plans the run in {run} was stopped (SIGINT) before anything was trained: give "
        "the same command again\n"
    )
    baseline.wait(LONGEST_SECONDS)
    assert files_of(run) == files_of(planned_run)


def test_a_finished_run_says_so_and_plans_nothing(planned_run, tmp_path):
    run = shutil.copytree(planned_run, tmp_path / "run")
    done = plimsoll("train", "--resume", "--out", run, "--budget", "500MiB")
    said = "all 2 steps are done; for more, give --set steps= and how many in all\n"
    assert (done.returncode, done.stderr) == (0, said)
    assert files_of(run) == files_of(planned_run)


def told(message: str, folder: Path) -> str:
    return DIFFERS.sub("<this>", without_machine(" ".join(message.split()) + "\n", folder))


PLANS = {
    "plan-torn": ("torn.json",),
    "plan-is-a-directory": (".",),
    "plan-is-no-plan": ("record.json",),
    "plan-of-a-gpu": ("gpu.json",),
    "plan-with-a-pin": ("plan.json", "--pin", "heap"),
    "plan-with-no-plan": ("plan.json", "--no-plan"),
}


@pytest.fixture
def plans(planned: Path, planned_run: Path, tmp_path: Path) -> Path:
    """Return a folder with the job, its plan, and files that are not plans of the job."""
    whole = json.loads((planned / "plan.json").read_text())
    tiny_job(tmp_path)
    shutil.copy(planned / "plan.json", tmp_path)
    shutil.copy(planned_run / "record.json", tmp_path)
    (tmp_path / "torn.json").write_text('{"record": "plan", "fallbacks": ')
    whole["made_for"]["target"] = "cuda 8.6"
    (tmp_path / "gpu.json").write_text(json.dumps(whole))
    return tmp_path


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_is_not_of_this_run(case, plans, planned, golden):
    plan, *others = PLANS[case]
    message = refused(plans / "job.yaml", "--out", plans / "run", "--plan", plans / plan, *others)
    golden(f"errors/{case}.txt", told(message, plans))
    assert not (plans / "run" / "data").exists()  # nothing was prepared for it
    if case == "plan-torn":  # the fault is corrected, and --force is not needed
        trained(plans / "job.yaml", "--out", plans / "run", "--plan", plans / "plan.json")


CONSTRAINTS = {
    "constraint-not-a-number": ("--pin", "micro_batch=two"),
    "constraint-contradiction": ("--pin", "optimizer_in_backward", "--pin", "micro_batch=1"),
}


@pytest.mark.parametrize("case", CONSTRAINTS)
def test_a_constraint_that_cannot_be_met(case, golden, tmp_path):
    """Cases that need no process are in tests/unit/planning/test_planning_plan.py."""
    golden(
        f"errors/{case}.txt", told(refused(tiny_job(tmp_path), "--out", tmp_path / "run", *CONSTRAINTS[case]), tmp_path)
    )
    assert not (tmp_path / "run" / "data").exists()


def test_plan_and_train_say_the_same_of_a_constraint(golden, tmp_path):
    done = plimsoll("plan", tiny_job(tmp_path), *CONSTRAINTS["constraint-contradiction"])
    assert (done.returncode, done.stdout) == (2, "")
    golden("errors/constraint-contradiction.txt", told(done.stderr[done.stderr.index("error: ") :], tmp_path))


TOLD_SHARE = 0.7
RECURRENT = {
    "model": {"architecture": "lstm", "embedding_size": 128, "hidden_size": 256, "num_layers": 2},
    "data": {"train": str(CORPUS.parent / "d*.py")},
    "tokenizer": {"vocab_size": 4000},
    "sequence_length": 256,
    "batch_size": 64,
    "steps": 3,
}


@pytest.mark.slow
def test_a_run_whose_plan_was_told_30_percent_too_little_recovers_by_its_fallbacks(tmp_path):
    """The plan of a large budget is edited: its peaks are 0.7 of the predicted ones, and so is the budget.

    The plan has no heap options, because holes of a heap cost further attempts: see the next test.
    """
    job, told = write_job(tmp_path / "job.yaml", **RECURRENT), tmp_path / "told.json"
    assert plimsoll("plan", job, "--budget", "4GiB", "--forbid", "heap", "-o", told).returncode == 0
    plan = json.loads(told.read_text())
    for configuration in plan["fallbacks"]:
        configuration["peak"] |= {name: int(TOLD_SHARE * size) for name, size in configuration["peak"].items() if size}
    plan["limit_bytes"] = plan["fallbacks"][0]["peak"]["high_bytes"]
    plan["budget"]["device_bytes"] = plan["limit_bytes"] + MARGIN_BYTES
    told.write_text(json.dumps(plan))
    run = tmp_path / "run"
    trained(job, "--out", run, "--plan", told)
    record = RunRecord.from_directory(run)
    assert 1 <= len(record.oom_events) <= 2
    assert {event.next_fallback for event in record.oom_events} <= {1, 2}
    assert_each_sample_once(steps_of(run), 3)
    whole = tmp_path / "whole"
    trained(job, "--out", whole, "--no-plan")
    assert [step.loss for step in steps_of(run)] == pytest.approx([step.loss for step in steps_of(whole)], rel=1e-5)


WIDE = {
    "model": {
        "architecture": "gpt2", "n_layer": 2, "n_embd": 768, "n_head": 4,
        "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "data": {"train": str(CORPUS.parent / "d*.py")},
    "tokenizer": {"vocab_size": 4000},
    "sequence_length": 64,
    "batch_size": 16,
    "steps": 3,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("budget_mib", [600, 1000])
def test_a_tight_plan_that_was_told_30_percent_too_little_is_survived(budget_mib, tmp_path):
    """The plan assumes 0.7 of every need. It is made for 0.7 of this budget, with heap options.

    These heaps leave holes, among which no fallback may fit. Then the run continues in a new process.
    """
    job, told = write_job(tmp_path / "job.yaml", **WIDE), tmp_path / "told.json"
    assert plimsoll("plan", job, "--budget", f"{budget_mib}MiB", "-o", told).returncode == 0
    plan = json.loads(told.read_text())
    for sizes in (plan["budget"], *(configuration["peak"] for configuration in plan["fallbacks"])):
        sizes |= {name: int(TOLD_SHARE * size) for name, size in sizes.items() if size}
    plan["limit_bytes"] = int(TOLD_SHARE * plan["limit_bytes"])
    told.write_text(json.dumps(plan))
    run = tmp_path / "run"
    trained(job, "--out", run, "--plan", told)
    record = RunRecord.from_directory(run)
    assert all(event.survived for event in record.oom_events)
    assert len(record.starts) <= 2
    assert_each_sample_once(steps_of(run), 3)
    whole = tmp_path / "whole"
    trained(job, "--out", whole, "--no-plan")
    assert [step.loss for step in steps_of(run)] == pytest.approx([step.loss for step in steps_of(whole)], rel=1e-5)
