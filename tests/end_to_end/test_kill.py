"""Runs killed at any moment by anyone: a resumed run ends like an undisturbed one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from end_to_end.commands import (
    SMALL_JOB,
    assert_each_sample_once,
    assert_same_bits,
    finish,
    kill_all,
    learned,
    lines_of,
    plimsoll,
    start,
    steps_of,
    steps_since_start,
    wait_for_worker,
    wait_until,
    worker_of,
    write_job,
)
from end_to_end.conftest import SLOW_STEPS
from plimsoll.device.cpu.cgroup import oom_kill_count
from plimsoll.errors import OutputError
from plimsoll.records.run import CheckpointLine, DeathLine, RunRecord, StartLine

kills_are_counted = pytest.mark.skipif(
    oom_kill_count() is None,
    reason="nothing counts OOM kills here, so nobody knows who sent SIGKILL and the micro-batch is cut",
)


class Murderer:
    """A helper that kills a run again and again, and resumes it if no supervisor does."""

    def __init__(self, job: Path, run: Path, cache: Path, seed: int) -> None:
        self.run = run
        self.random = random.Random(seed)
        self.num_deaths_of_worker = 0
        self._arguments: tuple[object, ...] = (job, "--out", run, "--cache", cache, "--set", "checkpoint.every=1")
        self._begin()

    def _begin(self) -> None:
        self.process = start("train", *self._arguments, "--json")
        self._arguments = ("--resume", "--out", self.run)

    def _num_starts(self) -> int:
        return sum(isinstance(line, StartLine) for line in lines_of(self.run))

    def wait_for_a_moment(self) -> None:
        """Let a new training process do two or three steps, so that it saves at least once and stops inside a step."""
        num_starts = self._num_starts() + 1
        wait_for_worker(self.process)
        num_steps = self.random.randint(2, 3)
        wait_until(lambda: steps_since_start(self.run, num_starts) >= num_steps, self.process)
        time.sleep(self.random.uniform(0, 0.05))

    def kill_worker(self) -> None:
        self.wait_for_a_moment()
        self._kill_worker()

    def _kill_worker(self) -> None:
        worker = wait_for_worker(self.process)
        worker.kill()
        self.num_deaths_of_worker += 1
        wait_until(lambda: worker_of(self.process) != worker, self.process)

    def kill_starting_worker(self) -> None:
        """Kill the training process while it loads libraries or the checkpoint."""
        wait_for_worker(self.process)
        time.sleep(self.random.uniform(0, 2))
        self._kill_worker()

    def kill_all(self) -> None:
        self.wait_for_a_moment()
        kill_all(self.process)
        self._begin()

    def kill_in_checkpoint(self) -> None:
        """Stop the training process while a checkpoint is half written, and kill it there."""
        self.wait_for_a_moment()
        worker = wait_for_worker(self.process)
        for number in range(1000):
            wait_until(self._is_writing, self.process, pause_seconds=0)
            worker.suspend()
            while worker.status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            if self._is_writing():
                self._kill_worker()
                return
            worker.resume()
            assert number < 999
        assert list(self.run.glob("checkpoints/.step-*"))

    def _is_writing(self) -> bool:
        return any(name.startswith(".step-") for name in os.listdir(self.run / "checkpoints"))


@pytest.mark.long
@kills_are_counted
@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(
    num_kills, slow_job, cache, undisturbed, tmp_path
):
    murderer = Murderer(slow_job, tmp_path / "run", cache, seed=num_kills)
    ways = [murderer.kill_all, murderer.kill_in_checkpoint, murderer.kill_starting_worker, murderer.kill_worker]
    for number in range(num_kills):
        ways[number % len(ways)]()
    done = finish(murderer.process)
    assert done.returncode == 0, done.stderr
    assert_same_bits(learned(undisturbed), learned(murderer.run))
    assert_each_sample_once(steps_of(murderer.run), SLOW_STEPS)
    deaths = [line for line in lines_of(murderer.run) if isinstance(line, DeathLine)]
    assert [death.signal for death in deaths] == ["SIGKILL"] * murderer.num_deaths_of_worker
    assert not list(murderer.run.glob("checkpoints/.step-*"))


@pytest.mark.slow
@kills_are_counted
def test_a_death_before_the_first_checkpoint_starts_anew(slow_job, cache, undisturbed, tmp_path):
    run = tmp_path / "run"
    process = start(
        "train", slow_job, "--out", run, "--cache", cache, "--set", "steps=4", "--set", "checkpoint.every=4", "--json"
    )
    wait_until(lambda: len(steps_of(run)) == 2, process)
    wait_for_worker(process).kill()
    assert finish(process).returncode == 0
    assert_each_sample_once(steps_of(run), 4)
    assert [step.loss for step in steps_of(run)] == [step.loss for step in steps_of(undisturbed)[:4]]
    (death,) = (line for line in lines_of(run) if isinstance(line, DeathLine))
    assert death.restarted_from_step == 0
    assert death.evidence in {
        "the memory cgroup counts no OOM kill: somebody sent the signal",
        "the whole machine counts no OOM kill: somebody sent the signal",
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_when_only_the_supervisor_is_killed_the_training_process_saves_and_ends(num_ranks, slow_job, cache, tmp_path):
    """With several ranks, the launcher receives the signal and forwards it to the ranks."""
    run = tmp_path / "run"
    process = start("train", slow_job, "--out", run, "--cache", cache, "--json", "--nproc", num_ranks)
    wait_until(lambda: len(steps_of(run)) >= 3, process)
    process.kill()
    process.communicate(timeout=60)  # until the training processes have closed standard error, too
    wait_until_ended = time.monotonic() + 60
    while RunRecord.from_directory(run).status == "running" and time.monotonic() < wait_until_ended:
        time.sleep(0.05)
    assert RunRecord.from_directory(run).status == "interrupted"
    last_saved = [line.step for line in lines_of(run) if isinstance(line, CheckpointLine)][-1]
    assert last_saved == len(steps_of(run)) < SLOW_STEPS


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Yield a folder with a short path, as sockets require."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_the_next_command_removes_the_temporary_files_that_a_kill_has_left(short_folder, cache, tmp_path):
    """Reading ahead creates sockets there. With several ranks, torchrun creates a folder."""
    run, folder = tmp_path / "run", short_folder
    job = write_job(tmp_path / "job.yaml", model="slow_models:slow", steps=12, data=SMALL_JOB["data"] | {"workers": 1})
    process = start("train", job, "--out", run, "--cache", cache, "--json", TMPDIR=str(folder))
    wait_until(lambda: len(steps_of(run)) >= 3, process)
    kill_all(process)
    assert ours_in(folder)
    process = start("train", "--resume", "--out", run, "--json", TMPDIR=str(folder))
    wait_until(lambda: len(steps_of(run)) >= 6, process)
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130
    assert ours_in(folder) == []
    assert plimsoll("train", "--resume", "--out", run, "--nproc", 2, TMPDIR=str(folder)).returncode == 0
    assert ours_in(folder) == []


def ours_in(folder: Path) -> list[str]:
    """Return the names in a folder, without torch's persistent caches."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.mark.slow
def test_a_run_whose_directory_is_deleted_ends_in_a_sentence_that_says_so(slow_job, cache, tmp_path):
    run = tmp_path / "run"
    process = start("train", slow_job, "--out", run, "--cache", cache, "--quiet")
    wait_until(lambda: len(steps_of(run)) >= 3, process)
    shutil.rmtree(run)
    done = finish(process)
    assert done.returncode == OutputError.exit_code
    assert done.stderr.count("error: ") == 1
    assert f"error: the run directory {run} is gone, or its files are: it was deleted or moved" in done.stderr
    assert not run.exists()


def memory_group() -> Path | None:
    """Return the folder of this process's memory cgroup (version 1), if groups can be created in it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        folder = Path(f"/sys/fs/cgroup/memory{path}")
        if "memory" in controllers.split(",") and os.access(folder, os.W_OK) and os.geteuid() == 0:
            return folder
    return None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Yield a memory cgroup inside the cgroup of this process."""
    parent = memory_group()
    if parent is None:
        pytest.skip("making a memory cgroup needs root and cgroup version 1 mounted at its usual place")
    group = parent / f"plimsoll-test-{os.getpid()}"
    group.mkdir()
    yield group
    group.rmdir()


@pytest.mark.long
def test_the_kernels_out_of_memory_killer_is_named_and_survived(small_group, cache, tmp_path):
    """Without a budget nothing keeps the process below the limit of the cgroup: step 9 needs 512 MiB more."""
    run = tmp_path / "run"
    job = write_job(tmp_path / "job.yaml", model="slow_models:growing", steps=12)
    (small_group / "memory.limit_in_bytes").write_text(str(640 << 20))
    inside = ("sh", "-c", f'echo $$ > "{small_group}/cgroup.procs"; exec "$@"', "sh")
    done = finish(start("train", job, "--out", run, "--cache", cache, "--json", before=inside))
    assert done.returncode == 0, done.stderr
    record = RunRecord.from_directory(run)
    assert record.status == "finished"
    assert_each_sample_once(steps_of(run), 12)
    (death,) = record.deaths
    assert (death.signal, death.restarted_from_step, death.next_micro_batch) == ("SIGKILL", 8, 8)
    assert death.evidence == "the memory cgroup counts 1 OOM kill(s) more than before: the kernel's OOM killer"
    assert [line.micro_batch for line in record.steps] == [16] * 8 + [8] * 4
    assert "going on from step 8 with micro-batch 8" in done.stderr
