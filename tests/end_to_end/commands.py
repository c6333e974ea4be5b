"""Real `plimsoll` processes, controlled with signals, watched from outside, and the files that they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import yaml
from safetensors.torch import load_file

import plimsoll
from plimsoll.device.process import private_bytes
from plimsoll.records.run import Line, StartLine, StepLine, read_lines

CORPUS = Path(json.__file__).parent  # real text on every machine: the source of Python's standard library
SOURCES = Path(plimsoll.__file__).parents[1]
LONGEST_SECONDS = 120

SMALL_JOB = {
    "model": {"architecture": "lstm", "embedding_size": 32, "hidden_size": 32, "num_layers": 2, "dropout": 0.1},
    "data": {"train": str(CORPUS / "*.py"), "validation": 0.1},
    "tokenizer": {"vocab_size": 400},
    "sequence_length": 64,
    "batch_size": 16,  # some 24 batches per epoch, the last one smaller
    "optimizer": {"lr": 1e-2, "clip_norm": 1.0},
    "steps": 5,
    "checkpoint": {"every": 2, "keep": 2},
}


def write_job(path: Path, **changes: object) -> Path:
    """Write the small job with some fields replaced."""
    path.write_text(yaml.safe_dump(SMALL_JOB | changes), encoding="utf-8")
    return path


def environment(**variables: str) -> dict[str, str]:
    """Return the environment for a subprocess, in which it finds plimsoll and `slow_models`."""
    paths = os.pathsep.join([str(SOURCES), str(Path(__file__).parent)])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | variables


def start(*arguments: object, before: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    """Start a command in its own process group; `before` is a command that executes it."""
    command = [*before, sys.executable, "-m", "plimsoll", *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command and return its result."""
    out, err = process.communicate(timeout=LONGEST_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def plimsoll(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its result."""
    return finish(start(*arguments, **variables))


def trained(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `plimsoll train`, which must succeed."""
    done = plimsoll("train", *arguments, "--json", **variables)
    assert done.returncode == 0, done.stderr
    return done


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], pause_seconds: float = 0.005) -> None:
    """Wait until a condition holds, while a command is running."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode}: {process.communicate()}"
        assert time.monotonic() < deadline
        time.sleep(pause_seconds)


def worker_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    """Wait for the training process that `plimsoll train` supervises, and return it."""
    for child in psutil.Process(process.pid).children():
        try:
            if "train-worker" in child.cmdline():
                return child
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return None


def wait_for_worker(process: subprocess.Popen[str]) -> psutil.Process:
    wait_until(lambda: worker_of(process) is not None, process)
    worker = worker_of(process)
    assert worker is not None
    return worker


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill the supervisor and its training process, as a power failure would."""
    process.send_signal(signal.SIGSTOP)  # so that it starts no process in between
    worker = worker_of(process)
    process.kill()
    if worker is not None:
        worker.kill()
    process.communicate()
    while worker is not None and worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.005)


def lines_of(run: Path) -> list[Line]:
    """Return all lines of the metrics."""
    return list(read_lines(run / "metrics.jsonl")) if (run / "metrics.jsonl").is_file() else []


def steps_of(run: Path) -> list[StepLine]:
    """Return the optimizer steps in the metrics."""
    return [line for line in lines_of(run) if isinstance(line, StepLine)]


def steps_since_start(run: Path, num_starts: int) -> int:
    """Return the steps of the training process that was started as number `num_starts`."""
    lines = lines_of(run)
    starts = [place for place, line in enumerate(lines) if isinstance(line, StartLine)]
    return sum(isinstance(line, StepLine) for line in lines[starts[-1] :]) if len(starts) >= num_starts else 0


def learned(run: Path) -> dict[str, torch.Tensor]:
    """Return the final tensors of a run: the saved model, and the last checkpoint with its optimizer."""
    last = max((run / "checkpoints").iterdir())
    model = torch.load(last / "model.pt", weights_only=True)
    states = torch.load(last / "optimizer.pt", weights_only=True)["state"]
    optimizer = {f"{index}.{name}": value for index, state in states.items() for name, value in state.items()}
    saved = {f"saved.{name}": value for name, value in load_file(run / "model" / "model.safetensors").items()}
    return model | optimizer | saved


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not different


def assert_each_sample_once(steps: list[StepLine], num_steps: int) -> None:
    """Assert that steps 1 to `num_steps` occur once each, and that their samples cover each epoch exactly once."""
    assert [step.step for step in steps] == list(range(1, num_steps + 1))
    epoch, position = 0, 0
    for step in steps:
        if (step.epoch, step.first_sample) != (epoch, position):
            assert (step.epoch, step.first_sample) == (epoch + 1, 0)
            epoch, position = step.epoch, 0
        position += step.num_samples
    sizes = {e: sum(step.num_samples for step in steps if step.epoch == e) for e in range(epoch)}
    assert len(set(sizes.values())) <= 1, sizes


class PeakWatch:
    """The peak of a process's private memory, read from outside every few milliseconds."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self.num_readings = 0
        self._pid = pid
        self._ended = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[PeakWatch]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            try:
                self.peak_bytes = max(self.peak_bytes, private_bytes(self._pid))
            except (FileNotFoundError, ProcessLookupError):
                return
            self.num_readings += 1
