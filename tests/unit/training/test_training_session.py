"""What the training process does before it trains: whose child it is, what it is given, what it refuses."""

import os
import signal
import time

import psutil
import pytest
import torch
from torch import nn

import plimsoll.training.loop
from plimsoll.errors import BudgetError, CheckpointError, FragmentedHeapError, OutOfMemoryError
from plimsoll.records.plan import Choice, Configuration, Plan, micro_batch_choice
from plimsoll.records.run import RunHead, RunRecord, StartLine, StepLine
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.train_step import TrainStep
from plimsoll.training import checkpoint
from plimsoll.training.prepare import prepare_run
from processes import LONGEST_SECONDS, run_program
from small_runs import make_run, small_job, train_here

LISTENS = """
import time
from plimsoll.processes.children import begin_worker
begin_worker()
print("listens", flush=True)
time.sleep(60)
"""


def test_a_worker_whose_supervisor_is_gone_already_ends_at_once():
    assert run_program(LISTENS, PLIMSOLL_SUPERVISOR="1").returncode == -signal.SIGTERM


# Starts a worker, says its number, and is gone.
SUPERVISOR = """
import os, subprocess, sys
worker = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]],
    env=os.environ | {"PLIMSOLL_SUPERVISOR": str(os.getpid())},
    stdout=subprocess.PIPE, text=True,
)
assert worker.stdout.readline() == "listens\\n"
print(worker.pid, flush=True)
os._exit(0)
"""


def test_a_worker_ends_with_its_supervisor():
    number = int(run_program(SUPERVISOR, LISTENS).stdout)
    until = time.monotonic() + LONGEST_SECONDS
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


def steps_of(directory):
    return [line for line in directory.lines() if isinstance(line, StepLine)]


def test_the_first_fallback_is_the_plans_unless_another_is_given(new_run):
    first, second = new_run("a", steps=1), new_run("b", steps=1)
    train_here(first)
    train_here(second, fallback=2)
    assert [directory.fallback_in_force() for directory in (first, second)] == [0, 2]
    assert [steps_of(directory)[0].micro_batch for directory in (first, second)] == [8, 2]


def test_after_a_death_the_fallback_schedule_is_still_made_from_the_batch(new_run):
    """A checkpoint at 8 samples, a death there, and it goes on at 2; the next checkpoint says how far it may grow."""
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


ON_THE_FLY = """
import sys
from plimsoll.records.job import Job
from plimsoll.planning.baseline import load_libraries

on_the_fly = {"on_the_fly": True, "long_texts": "truncate"} if sys.argv[1] == "yes" else {}
load_libraries(Job.from_fields({"model": "lstm", "data": {"train": "none"} | on_the_fly}))
print("pyarrow" in sys.modules)
"""


@pytest.mark.long
def test_what_reads_texts_is_loaded_before_memory_is_limited():
    """Inside a budget an evaluation of texts that are tokenized on the fly had no room for the libraries of pyarrow."""
    assert run_program(ON_THE_FLY, "yes").stdout == "True\n"
    assert run_program(ON_THE_FLY, "no").stdout == "False\n"


def test_a_training_process_loads_no_planner_and_no_solver():
    """What it loads is taken of the budget: scipy's solver alone takes 20 MiB."""
    program = "import sys, plimsoll.training.session; print(*sys.modules)"
    loaded = set(run_program(program).stdout.split())
    assert "plimsoll.planning.trial" in loaded
    assert not loaded & {
        "scipy",
        "sympy",
        "transformers",
        "torch._dynamo",
        "plimsoll.planning.search.search",
        "plimsoll.planning.plan",
    }


@pytest.mark.parametrize("has_supervisor", [True, False])
def test_memory_that_runs_out_between_steps_is_for_a_new_process(has_supervisor, new_run, monkeypatch):
    """As in the writing of a line, where nothing can be undone: the checkpoints are the way back."""
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
    with armed("backward"):  # disarms what the environment adds
        train_here(directory)
    assert steps_of(directory)[0].micro_batch == 4


def test_the_record_says_how_far_truncated_gradients_reach(new_run):
    """Windows of 32 tokens, of which 31 are read, in segments of 8."""
    directory = new_run(steps=2, model={"architecture": "gru"}, allow=["truncated_bptt"])
    choices = (micro_batch_choice(8), Choice(technique="truncated_bptt", options={"steps": 8}))
    Plan.load(directory.plan).model_copy(update={"fallbacks": (Configuration(choices=choices),)}).save(directory.plan)
    train_here(directory)
    reach = RunRecord.from_directory(directory.path).gradient_reach
    assert (reach.most_tokens, reach.mean_tokens) == (8, (3 * 36 + 28) / 31)
