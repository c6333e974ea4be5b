"""Stopped and resumed runs: they equal runs that were never stopped."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from end_to_end.commands import (
    assert_each_sample_once,
    assert_same_bits,
    finish,
    learned,
    lines_of,
    plimsoll,
    start,
    steps_of,
    trained,
    wait_for_worker,
    wait_until,
    write_job,
)
from end_to_end.conftest import SLOW_STEPS
from plimsoll.records.run import EndLine, RunRecord, StartLine


def losses(run: Path) -> list[tuple[float, float | None]]:
    """Return the loss and the gradient norm of each step, which depend on every bit of the weights."""
    return [(step.loss, step.gradient_norm) for step in steps_of(run)]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_stopped_run_saves_its_step_and_goes_on_bit_for_bit(number, code, slow_job, cache, undisturbed, tmp_path):
    run = tmp_path / "run"
    process = start("train", slow_job, "--out", run, "--cache", cache, "--json")
    wait_until(lambda: len(steps_of(run)) >= 21, process)
    process.send_signal(number)
    stopped = finish(process)
    assert stopped.returncode == code
    num_done = len(steps_of(run))
    assert stopped.stderr == (
        f"stopped after step {num_done} of {SLOW_STEPS}, which is saved: "
        f"go on with `plimsoll train --resume --out {run}`\n"
    )
    assert RunRecord.from_directory(run).status == "interrupted"
    assert (run / "checkpoints" / f"step-{num_done:08d}").is_dir()
    trained("--resume", "--out", run)
    assert_same_bits(learned(undisturbed), learned(run))
    assert_each_sample_once(steps_of(run), SLOW_STEPS)
    assert losses(run) == losses(undisturbed)
    assert RunRecord.from_directory(run).status == "finished"


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(cache, tmp_path):
    """The first step sleeps for minutes, so only the second Ctrl-C can end it."""
    run = tmp_path / "run"
    job = write_job(tmp_path / "job.yaml", model="slow_models:endless")
    process = start("train", job, "--out", run, "--cache", cache, "--json")
    wait_until(lambda: any(isinstance(line, StartLine) for line in lines_of(run)), process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    assert done.stderr.endswith(
        "stopped at once, and step 0 is the last one saved: give the same command again, with --force\n"
    )
    assert "Traceback" not in done.stderr
    assert steps_of(run) == []


@pytest.mark.long
@pytest.mark.cold
@pytest.mark.parametrize("stage", ["prepare-worker", "train-worker"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_before_the_first_step_ends_the_command_with_its_code(number, code, stage, cache, tmp_path):
    """This includes the time when libraries are loaded and no handler is installed yet."""
    run = tmp_path / "run"
    process = start("train", write_job(tmp_path / "job.yaml"), "--out", run, "--cache", cache, "--json")
    if stage == "train-worker":
        wait_for_worker(process)  # its libraries are loaded from the start
    else:
        wait_until((run / "plan.json").is_file, process)
        time.sleep(0.4)
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert steps_of(run) == []


def test_a_run_goes_on_for_more_steps_and_under_another_budget(short_run, undisturbed):
    trained("--resume", "--out", short_run, "--set", "steps=9", "--budget", "700MiB")
    assert losses(short_run) == losses(undisturbed)[:9]
    assert_each_sample_once(steps_of(short_run), 9)
    assert RunRecord.from_directory(short_run).limit_bytes == 700 << 20
    assert [line.step for line in lines_of(short_run) if isinstance(line, EndLine)] == [9]


def test_going_on_from_an_earlier_step_leaves_nothing_of_the_later_ones(short_run, undisturbed):
    """Otherwise the next restart would load a checkpoint of a different history."""
    trained("--resume", "--from-step", 2, "--out", short_run, "--set", "steps=5")
    assert sorted(folder.name[-2:] for folder in (short_run / "checkpoints").iterdir()) == ["02", "04", "05"]
    assert losses(short_run) == losses(undisturbed)[:5]
    assert_each_sample_once(steps_of(short_run), 5)


def test_a_change_that_the_checkpoint_refuses_is_not_kept(short_run):
    kept = [(short_run / name).read_text() for name in ("job.yaml", "plan.json", "metrics.jsonl")]
    refused = plimsoll("train", "--resume", "--out", short_run, "--set", "batch_size=8", "--json")
    assert refused.returncode == 2
    assert "batch_size was 16, is 8" in refused.stderr
    assert kept == [(short_run / name).read_text() for name in ("job.yaml", "plan.json", "metrics.jsonl")]


@pytest.fixture
def without_tokens(slow_job: Path, tmp_path: Path) -> Path:
    """Return a run of two steps with its own text, whose tokens have been deleted."""
    (tmp_path / "text.txt").write_text("the ship sinks to its line and no further, however it is loaded\n" * 400)
    changes = ("--set", "steps=2", "--set", f"data.train={tmp_path / 'text.txt'}", "--set", "data.validation=")
    trained(slow_job, "--out", tmp_path / "run", *changes)
    shutil.rmtree(tmp_path / "run" / "data")
    return tmp_path / "run"


@pytest.mark.slow
def test_tokens_that_were_deleted_are_made_again(without_tokens):
    trained("--resume", "--out", without_tokens, "--set", "steps=4")
    assert [step.step for step in steps_of(without_tokens)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_tokens_that_were_deleted_are_not_made_of_another_text(without_tokens):
    (without_tokens.parent / "text.txt").write_text("another text\n" * 400)
    kept = [(without_tokens / name).read_text() for name in ("job.yaml", "prepared.json", "metrics.jsonl")]
    refused = plimsoll("train", "--resume", "--out", without_tokens, "--set", "steps=4", "--json")
    assert refused.returncode == 2
    assert f"the tokens of this run (in {without_tokens / 'data'}) cannot be made again: the texts" in refused.stderr
    assert kept == [(without_tokens / name).read_text() for name in ("job.yaml", "prepared.json", "metrics.jsonl")]


def test_a_run_that_was_stopped_before_it_had_data_says_so(short_run):
    (short_run / "prepared.json").unlink()
    done = plimsoll("train", "--resume", "--out", short_run, "--json")
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {short_run} was stopped before its data was ready, so there is nothing to resume: "
        f"start it again with `plimsoll train job.yaml --out {short_run}`\n",
    )
