"""Processes that a supervisor starts and restarts. A script replaces Python and ends as the test requires."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import Interrupted, KilledError, RankLostError
from plimsoll.records.run import CheckpointLine, DeathLine, Line, StartLine, StepLine
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.supervise import make_plan, prepare_data, supervise

NewRun = Callable[..., RunDirectory]
LOST = f"exit {RankLostError.exit_code}"
BUS = "kill -BUS $$"  # as if /dev/shm were full; it counts as lack of memory on any machine


def start(fallback: int = 0, step: int = 0) -> StartLine:
    return StartLine(
        time_seconds=0, step=step, micro_batch=8, fallback=fallback, baseline_bytes=1, wall_time="2026-01-31"
    )


def step(number: int, fallback: int = 0) -> StepLine:
    return StepLine(
        time_seconds=number, step=number, epoch=0, first_sample=0, num_samples=8, num_units=8, loss=1.0,
        learning_rate=0.1, step_seconds=1.0, micro_batch=8, fallback=fallback,
    )  # fmt: skip


def saved(number: int) -> CheckpointLine:
    return CheckpointLine(time_seconds=number, step=number, num_bytes=1)


class Script:
    """A script in place of Python that records its arguments and ends as it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "python"
        self.path.write_text(f'#!/bin/sh\ncd {folder}\necho "$@" >> told\n. ./$(wc -l < told)\n')
        self.path.chmod(0o755)
        self.num_endings = 0

    def then(self, how: str, directory: RunDirectory | None = None, lines: tuple[Line, ...] = ()) -> None:
        """Let the next process write lines into a run directory, and end."""
        self.num_endings += 1
        text = "".join(line.model_dump_json() + "\n" for line in lines)
        written = f"cat >> {directory.metrics} <<'END'\n{text}END\n" if directory is not None else ""
        (self.folder / str(self.num_endings)).write_text(f"{written}{how}\n")

    def commands(self) -> list[str]:
        """Return the arguments of all processes so far."""
        return [line.removeprefix("-m plimsoll ") for line in (self.folder / "told").read_text().splitlines()]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    folder = tmp_path / "script"
    folder.mkdir()
    script = Script(folder)
    monkeypatch.setattr(sys, "executable", str(script.path))
    return script


def deaths_in(directory: RunDirectory) -> list[DeathLine]:
    return [line for line in directory.lines() if isinstance(line, DeathLine)]


@pytest.mark.parametrize(
    ("lines", "arguments"),
    [
        (
            (),
            "--resume --from-step 2 --fallback 1",
        ),  # it died while it was loading
        ((start(),), "--resume-newest --fallback 1 --too-large-fallback 0"),
        ((start(), step(1)), "--resume-newest --fallback 1"),
        ((start(2), step(1, 2)), "--resume-newest --fallback 3"),
        ((start(2), step(1, 1), step(2, 2)), "--resume-newest --fallback 3"),
        ((start(2), step(1, 2), start(1)), "--resume-newest --fallback 2 --too-large-fallback 1"),
        ((start(3), step(1, 3)), "--resume-newest --fallback 3"),  # no fallback follows
    ],
)
def test_what_is_started_after_a_death_follows_from_how_far_the_process_came(
    new_run: NewRun, python: Script, lines: tuple[Line, ...], arguments: str
) -> None:
    directory = new_run()
    python.then(BUS, directory, lines)
    python.then("exit 0")
    assert supervise(directory, ("--resume", "--from-step", "2"), quiet=True) == 0
    begin = f"train-worker {directory.path}"
    assert python.commands() == [
        f"{begin} --resume --from-step 2 --restarts 0 --quiet",
        f"{begin} {arguments} --restarts 1 --quiet",
    ]


def test_each_death_takes_a_smaller_micro_batch_and_after_a_checkpoint_names_the_fallback(
    new_run: NewRun, python: Script
) -> None:
    directory = new_run()
    python.then(BUS)
    python.then(BUS, directory, (start(1), step(1, 1)))
    python.then(LOST, directory, (start(2, step=1), step(2, 2), saved(2)))
    python.then("exit 5")
    assert supervise(directory) == 5
    begin = f"train-worker {directory.path}"
    assert python.commands() == [
        f"{begin} --restarts 0",
        f"{begin} --fallback 1 --restarts 1",
        f"{begin} --resume-newest --fallback 2 --restarts 2",
        f"{begin} --resume-newest --restarts 3",
    ]
    found = [(death.restarted_from_step, death.next_fallback, death.next_micro_batch) for death in deaths_in(directory)]
    assert found == [(0, 1, 4), (0, 2, 2), (2, 2, 2)]
    assert [death.time_seconds for death in deaths_in(directory)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("lines", "saved_step", "with_what"), [((), 0, "--force"), ((saved(1),), 1, "--resume")])
def test_the_third_death_without_a_checkpoint_in_between_ends_the_run(
    new_run: NewRun, python: Script, capsys: pytest.CaptureFixture[str], lines: tuple[Line, ...], saved_step: int,
    with_what: str,
) -> None:  # fmt: skip
    """A lost rank does not reduce the micro-batch. One more death is allowed if the first process has saved."""
    directory = new_run()
    most_deaths = 3 + len(lines)
    python.then(LOST, directory, (start(), step(1), *lines))
    for _ in range(most_deaths):
        python.then(LOST, directory, (start(step=saved_step), step(2)))
    with pytest.raises(
        KilledError, match=rf"\(rank lost\) 3 times without getting past step {saved_step}, .*{with_what}"
    ):
        supervise(directory)
    assert len(python.commands()) == most_deaths
    deaths = deaths_in(directory)
    assert [death.restarted_from_step for death in deaths] == [saved_step] * (most_deaths - 1) + [None]
    assert {death.next_fallback for death in deaths} == {0}
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("training process ended (rank lost): ") for line in said)
    assert [line.endswith("; giving up") for line in said] == [False] * (most_deaths - 1) + [True]


def test_ranks_are_started_by_a_launcher_whose_code_tells_of_a_signal(new_run: NewRun, python: Script) -> None:
    alone, shared = new_run("alone"), new_run("shared", ranks=2)
    code = 128 + signal.SIGBUS
    python.then(f"exit {code}")
    assert supervise(alone) == code
    python.then(f"exit {code}")
    python.then("exit 0")
    assert supervise(shared, quiet=True, num_ranks=2) == 0
    assert python.commands() == [
        f"train-worker {alone.path} --restarts 0",
        f"launch-worker 2 -- train-worker {shared.path} --restarts 0 --quiet",
        f"launch-worker 2 -- train-worker {shared.path} --fallback 1 --restarts 1 --quiet",
    ]


def test_data_are_prepared_and_plans_made_as_is_asked_for(new_run: NewRun, python: Script, tmp_path: Path) -> None:
    directory, cache = new_run(), tmp_path / "cache"
    for code in range(4):
        python.then(f"exit {code}")
    asked: list[dict[str, Any]] = [
        {"quiet": False},
        {"quiet": True, "again": True, "constraints": ("--pin", "checkpointing")},
    ]
    assert [prepare_data(directory, cache, **options) for options in asked] == [0, 1]
    assert [make_plan(directory, ("--keep",), quiet) for quiet in (False, True)] == [2, 3]
    assert python.commands() == [
        f"prepare-worker {directory.path} {cache}",
        f"prepare-worker {directory.path} {cache} --pin checkpointing --quiet --again",
        f"plan-worker {directory.path} --keep",
        f"plan-worker {directory.path} --keep --quiet",
    ]


@pytest.mark.parametrize(
    ("how", "code", "remedy"),
    [
        (BUS, 128 + signal.SIGBUS, r"SIGBUS.*: free memory on the machine, or train without a plan \(--no-plan\)"),
        ("kill -SEGV $$", 128 + signal.SIGSEGV, "SIGSEGV.*no budget was enforced.*: find what crashes: where"),
    ],
    ids=["perhaps memory", "crash"],
)
def test_a_plan_that_dies_is_told_with_what_takes_less_memory_only_where_it_may_be_memory(
    new_run: NewRun, python: Script, how: str, code: int, remedy: str
) -> None:
    python.then(how)
    with pytest.raises(KilledError, match=remedy) as caught:
        make_plan(new_run(), (), quiet=True)
    assert caught.value.exit_code == code


TWO_SIGNALS = """
number=0
trap 'number=$((number + 1))' TERM
wait_for() { while [ $number -lt $1 ]; do sleep 0.01; done; }
kill -INT $PPID; wait_for 1
kill -TERM $PPID; wait_for 2
trap - TERM; kill -TERM $$
"""


def test_each_signal_is_handed_on_and_the_first_is_what_stopped_it(new_run: NewRun, python: Script) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    python.then(TWO_SIGNALS)
    with pytest.raises(Interrupted, match=r"was stopped \(SIGINT\) before anything was trained") as caught:
        make_plan(new_run(), (), quiet=True)
    assert caught.value.exit_code == 130
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_comes_before_the_process_is_there_stops_it(
    new_run: NewRun, python: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", Late)
    python.then("exec sleep 5")
    with pytest.raises(Interrupted) as caught:
        make_plan(new_run(), (), quiet=True)
    assert caught.value.exit_code == 128 + signal.SIGTERM
