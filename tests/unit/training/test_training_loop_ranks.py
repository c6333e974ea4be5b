"""The loop of several ranks: all stop after the step in which one is asked to stop, and rank 0 records for all."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from tests.processes import LONGEST_SECONDS
from tests.ranks_started import start_ranks

from plimsoll.distributed.ranks import Ranks
from plimsoll.records.run import EndLine, OomEvent, RunRecord
from plimsoll.training.loop import _note_oom, _told_after_step
from plimsoll.training.run_directory import RunDirectory
from small_runs import MODEL, train_here

PROGRAM = """
import os
import signal
import sys
from pathlib import Path

import plimsoll.training.loop
from plimsoll.errors import Interrupted
from plimsoll.distributed.ranks import joined
from plimsoll.training.session import Session


def signal_and_note(training, batch, result):
    if result.step == 3 and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    note_step(training, batch, result)


note_step = plimsoll.training.loop.note_step
with joined() as ranks:
    plimsoll.training.loop.note_step = signal_and_note
    try:
        Session(Path(sys.argv[1]), ranks=ranks).run()
    except Interrupted as error:
        print(error.exit_code)
    plimsoll.training.loop.note_step = note_step
    Session(Path(sys.argv[1]), resume=True, restarts=1, quiet=True, ranks=ranks).run()
"""


def weights_of(directory: RunDirectory) -> dict[str, torch.Tensor]:
    return load_file(directory.model / "model.safetensors")


def test_a_signal_to_one_rank_stops_all_after_its_step_and_they_go_on_from_what_the_first_saved(
    new_run: Callable[..., RunDirectory],
) -> None:
    model = MODEL | {"dropout": 0.0}  # each rank has its own dropout masks
    alone, shared = (new_run(f"of-{number}", model=model, ranks=number, evaluate_every=2) for number in (1, 2))
    train_here(alone)
    ranks = start_ranks(2, ["-c", PROGRAM, shared.path])
    try:
        (first_out, first_errors), (second_out, second_errors) = (
            rank.communicate(timeout=LONGEST_SECONDS) for rank in ranks
        )
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], first_errors + second_errors
    assert (first_out, second_out) == (f"{128 + signal.SIGTERM}\n",) * 2
    assert "step 1/6" in first_errors
    assert "step 1/6" not in second_errors
    record, expected = RunRecord.from_directory(shared.path), RunRecord.from_directory(alone.path)
    assert RunRecord.load(shared.record) == record
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert [step.num_samples for step in record.steps] == [8] * 6
    assert [(start.step, start.restarts) for start in record.starts] == [(0, 0), (3, 1)]
    assert [line.step for line in record.checkpoints] == [2, 3, 4, 6]
    assert [(line.step, line.num_samples) for line in record.evaluations] == [(2, 54), (4, 54), (6, 54)]
    assert [line.status for line in shared.lines() if isinstance(line, EndLine)] == ["finished"]
    for step in record.steps:
        assert len(step.peak_bytes_of_ranks) == 2
        assert step.peak_bytes == max(step.peak_bytes_of_ranks)
    for found, line in zip(record.evaluations, expected.evaluations, strict=True):
        assert abs(found.loss - line.loss) < 1e-4
    weights = weights_of(alone)
    assert all(torch.allclose(tensor, weights[name], atol=1e-4) for name, tensor in weights_of(shared).items())


class FirstOfTwo(Ranks):
    """Rank 0 of two; rank 1 has survived an out-of-memory error in its update."""

    def __init__(self, event):
        super().__init__()
        self.world_size, self.event = 2, event

    def each(self, numbers):
        return [list(numbers), [0, 7, 1]]

    def gather(self, value):
        return [value, [self.event]]


def test_what_a_rank_alone_has_survived_is_written_down_with_its_rank():
    own, other = (OomEvent(family="cpu", phase="optimizer", step=3, live_bytes=live) for live in (1, 2))
    of_all = own.model_copy(update={"phase": "forward", "rank": 1})
    written, said = [], []
    training = SimpleNamespace(
        ranks=FirstOfTwo(other), stop=SimpleNamespace(signal_number=None), asked_all=None,
        directory=SimpleNamespace(append=written.append), sampler=SimpleNamespace(seconds=lambda: 0.0),
        view=SimpleNamespace(say=said.append),
    )  # fmt: skip
    for event in (of_all, own):  # in the order of the step
        _note_oom(training, event)
    assert _told_after_step(training, 5, [of_all, own]) == (5, 7)
    assert [(event.rank, event.phase, event.live_bytes) for event in written] == [
        (1, "forward", 1), (0, "optimizer", 1), (1, "optimizer", 2)
    ]  # fmt: skip
    assert said[2].startswith("out of memory in optimizer on rank 1, step 3:")
