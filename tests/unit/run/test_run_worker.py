"""The processes behind `plimsoll train`: what they read and leave, and that they do not outlive their supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from end_to_end.commands import environment, lines_of, plimsoll, steps_of, wait_until
from plimsoll.records.run import CheckpointLine, EndLine, RunHead, StartLine
from plimsoll.run.directory import RunDirectory

_PARENT = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], env=os.environ | {"PLIMSOLL_SUPERVISOR": str(os.getpid())})
print(process.pid, flush=True)
process.wait()
"""


@pytest.fixture
def endless_run(run_copy: Path) -> Path:
    """The run of this session with more steps to do than a test waits for."""
    job = RunDirectory(run_copy).job
    job.write_text(job.read_text().replace("steps: 2\n", "steps: 1000000\n"))
    return run_copy


@pytest.fixture
def orphaned(endless_run: Path) -> Iterator[psutil.Process]:
    """A training process whose supervisor, a real one, was killed when some steps were done."""
    command = [sys.executable, "-m", "plimsoll", "train-worker", str(endless_run), "--resume", "--quiet"]
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, *command], env=environment(), stdout=subprocess.PIPE, text=True
    ) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: len(steps_of(endless_run)) > 4, parent)
        parent.send_signal(signal.SIGKILL)
    yield worker
    if worker.is_running():
        worker.kill()


def test_a_training_process_ends_with_its_supervisor_and_saves_its_step(orphaned, endless_run):
    psutil.wait_procs([orphaned], timeout=60)
    assert not orphaned.is_running() or orphaned.status() == psutil.STATUS_ZOMBIE
    *_, saved, end = lines_of(endless_run)
    assert isinstance(saved, CheckpointLine)
    assert isinstance(end, EndLine)
    assert (end.status, end.step) == ("interrupted", saved.step)
    assert saved.step == steps_of(endless_run)[-1].step


@pytest.mark.parametrize("command", ["train-worker", "prepare-worker"])
def test_a_supervisor_that_is_gone_already_ends_the_process_before_it_writes(command, run_copy, tmp_path):
    """This process's parent is not the supervisor that the variable names: it must have been, and died."""
    before = lines_of(run_copy)
    arguments = [] if command == "train-worker" else [tmp_path / "cache"]
    done = plimsoll(command, run_copy, *arguments, PLIMSOLL_SUPERVISOR=str(os.getppid()))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")
    assert lines_of(run_copy) == before
    assert not (tmp_path / "cache").exists()


def test_a_process_that_was_started_by_hand_needs_no_supervisor(finished, run_copy):
    done = plimsoll("prepare-worker", run_copy, finished.cache)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_finished_training_leaves_its_head_its_start_and_a_model_with_its_tokenizer(finished):
    directory = RunDirectory(finished.path)
    head = RunHead.load(directory.head)
    assert (head.job["steps"], head.device.kind) == (2, "cpu")
    assert head.fingerprint["batch_size"] == "16"
    assert head.versions["torch"]
    starts = [line for line in directory.lines() if isinstance(line, StartLine)]
    assert [(line.step, line.micro_batch, line.restarts) for line in starts] == [(0, 16, 0)]
    assert (directory.model / "model.safetensors").is_file()
    assert Tokenizer.from_file(str(directory.model / "tokenizer.json")).get_vocab_size() == 400
