"""Exact ledgers of samples: memory runs out in every phase of a training, and no sample is lost or repeated.

The ledger is the view of the loss function: for each committed step, the ids of the samples in its last attempt.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plimsoll.data.batches.loader import Loader
from plimsoll.data.samples import windows
from plimsoll.data.samples.windows import Subset
from plimsoll.models.assemble import Assembled
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_plan
from plimsoll.records.run import EvaluationLine, OomEvent, Phase, RunHead, StepLine
from plimsoll.step.failpoints import armed
from plimsoll.step.recovery import micro_batch_sizes
from plimsoll.step.train_step import TrainStep
from plimsoll.step.update.commit import StepCommit
from plimsoll.training.loop import Training, train
from plimsoll.training.monitor import MemorySampler
from plimsoll.training.run_directory import RunDirectory
from workloads import BATCH_SIZE, CASES, Case, largest_relative_difference, plain_loop, weights_of

NUM_SAMPLES = 20  # batches of 8, 8 and 4
NUM_EPOCHS = 2
LAST_STEP = 6
CLOSE = 1e-5


class Samples(windows.Samples):
    """The samples of a case as a data set whose batches also contain their ids."""

    sequence_length = 1

    def __init__(self, case: Case) -> None:
        self._fields = case.data()
        self._fields["sample_ids"] = torch.arange(len(self._fields["labels"]))

    def __len__(self) -> int:
        return len(self._fields["labels"])

    def batch(self, ids: np.ndarray, epoch: int = 0) -> dict[str, torch.Tensor]:
        return {name: values[torch.from_numpy(ids)] for name, values in self._fields.items()}

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), np.int64)


@dataclass
class Ledger:
    """The loss of a training, and a view that records the samples in the loss of each committed step."""

    seen: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if model.training:
            self.seen += batch["sample_ids"].tolist()
        return model(**without_ids(batch)).loss

    def update(self, line: StepLine, memory: Any) -> None:
        self.committed += self.seen[-line.num_samples :]
        self.seen.clear()

    def say(self, text: str) -> None:
        pass

    @contextmanager
    def shown(self) -> Iterator[Ledger]:
        yield self

    def epochs(self) -> list[list[int]]:
        """Return the committed samples of each epoch, sorted."""
        starts = range(0, len(self.committed), NUM_SAMPLES)
        return [sorted(self.committed[start : start + NUM_SAMPLES]) for start in starts]


def without_ids(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values for name, values in batch.items() if name != "sample_ids"}


@dataclass
class Trained:
    """The ledger, lines and weights of a finished training."""

    ledger: Ledger
    steps: list[StepLine]
    events: list[OomEvent]
    validation_losses: list[float]
    weights: dict[str, torch.Tensor]


def trained(case: Case, path: Path) -> Trained:
    """Train two epochs with the whole loop, with an evaluation and a checkpoint after every step."""
    samples, ledger = Samples(case), Ledger()
    job = Job.from_fields(
        {
            "model": "lstm",  # a job needs a model; the case provides its own
            "data": "none",
            "batch_size": BATCH_SIZE,
            "steps": LAST_STEP,
            "evaluate_every": 1,
            "checkpoint": {"every": 1, "keep": 1},
        }
    )
    model, optimizer = case.fresh()
    training = Subset(samples, np.arange(NUM_SAMPLES))
    loader = Loader(training, BATCH_SIZE, seed=3)
    held_out = Subset(samples, np.arange(NUM_SAMPLES, NUM_SAMPLES + BATCH_SIZE))
    parts = Assembled(model, optimizer, None, ledger.loss, case.units, training, loader, held_out)
    step = TrainStep(model, optimizer, ledger.loss, units=case.units, clip_norm=1.0)
    step._commit = StepCommit(optimizer, step.backend, step.position, chunk_bytes=1)
    directory = RunDirectory.create(path, force=False)
    micro_batch_plan(job.budget, micro_batch_sizes(BATCH_SIZE)).save(directory.plan)
    head = RunHead(job=job.model_dump(mode="json"), device=step.backend.probe(), versions={}, fingerprint={})
    head.save(directory.head)
    train(Training(job, parts, step, directory, {}, MemorySampler(step.backend), ledger))
    lines = directory.lines()
    last = directory.checkpoints / f"step-{LAST_STEP:08d}"
    states = torch.load(last / "optimizer.pt", weights_only=True)["state"]
    return Trained(
        ledger,
        [line for line in lines if isinstance(line, StepLine)],
        [line for line in lines if isinstance(line, OomEvent)],
        [line.loss for line in lines if isinstance(line, EvaluationLine)],
        torch.load(last / "model.pt", weights_only=True)
        | {f"{index}.{name}": value for index, state in states.items() for name, value in state.items()},
    )


def plain(case: Case, committed: list[int], cuts: list[int]) -> dict[str, torch.Tensor]:
    """Return the weights of the plain loop over the same samples in the same micro-batches."""
    samples = Samples(case)
    ids = [np.array(committed[epoch + start : epoch + stop]) for epoch in (0, NUM_SAMPLES) for start, stop in BATCHES]
    batches = [without_ids(samples.batch(some)) for some in ids]
    model, optimizer = case.fresh()
    plain_loop(OfBatches(case.units, batches), model, optimizer, cuts)
    return weights_of(model, optimizer)


BATCHES = ((0, 8), (8, 16), (16, 20))


@dataclass
class OfBatches:
    """The part of a case that `plain_loop` needs."""

    units: str
    listed: list[dict[str, torch.Tensor]]

    def batches(self) -> list[dict[str, torch.Tensor]]:
        return self.listed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains a case without out-of-memory errors, once per case."""
    return functools.cache(lambda case: trained(case, tmp_path_factory.mktemp("undisturbed") / "run"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_undisturbed_the_whole_loop_has_the_bits_of_the_plain_one(case, undisturbed):
    found = undisturbed(case)
    assert found.ledger.epochs() == [list(range(NUM_SAMPLES))] * NUM_EPOCHS
    assert found.ledger.committed[:NUM_SAMPLES] != found.ledger.committed[NUM_SAMPLES:]
    expected = plain(case, found.ledger.committed, [line.micro_batch for line in found.steps])
    assert largest_relative_difference(expected, found.weights) == 0


def passages(phase: str, at_step: int, case: Case) -> tuple[int, ...]:
    """Return the passages of a failpoint that are in the middle of a phase, if no failure has happened before."""
    num_parameters = len(list(case.build().parameters()))
    return {
        "optimizer": ((at_step - 1) * num_parameters + num_parameters // 2,),
        "checkpoint": ((at_step - 1) * 3 + 2,),  # a checkpoint has three files
    }.get(phase, (at_step,))


def in_the_grid() -> Iterator[Any]:
    """Return every phase of every model in steps 1, 3 and the last; half of the grid, like a chessboard, is slow."""
    for row, case in enumerate(CASES):
        for column, phase in enumerate(typing.get_args(Phase)):
            for layer, at_step in enumerate((1, 3, LAST_STEP)):
                marks = [pytest.mark.slow] if (row + column + layer) % 2 else []
                yield pytest.param(case, phase, at_step, marks=marks, id=f"{case.name}-{phase}-{at_step}")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("case", "phase", "at_step"), list(in_the_grid()))
def test_memory_that_runs_out_once_changes_nothing(case, phase, at_step, undisturbed, tmp_path):
    with armed(phase, *passages(phase, at_step, case)):
        found = trained(case, tmp_path / "run")
    expected = undisturbed(case)
    assert [event.phase for event in found.events] == [phase]
    assert found.events[0].step == at_step
    assert found.ledger.committed == expected.ledger.committed
    assert found.ledger.epochs() == [list(range(NUM_SAMPLES))] * NUM_EPOCHS
    is_cut = at_step == 1 and phase in ("copy", "forward", "loss", "backward", "clip") and not case.has_batch_norm
    first = [4, 4, 4] if is_cut else [8, 8, 4]  # and whole again after three clean steps
    assert [line.micro_batch for line in found.steps] == first + [8, 8, 4] * (NUM_EPOCHS - 1)
    if is_cut:
        plainly = plain(case, found.ledger.committed, [line.micro_batch for line in found.steps])
        assert largest_relative_difference(plainly, found.weights) < CLOSE
    else:
        assert largest_relative_difference(expected.weights, found.weights) == 0
        assert found.validation_losses == pytest.approx(expected.validation_losses, rel=CLOSE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory_that_runs_out_in_every_phase_of_one_step_changes_nothing(case, undisturbed, tmp_path):
    """Each recovery must leave a clean start for the next one. The third step has fitted, so it is not split first."""
    with ExitStack() as stack:
        for phase in ("fetch", "backward", "optimizer", "evaluation", "checkpoint"):
            stack.enter_context(armed(phase, *passages(phase, 3, case)))
        found = trained(case, tmp_path / "run")
    assert [event.phase for event in found.events] == ["fetch", "backward", "optimizer", "evaluation", "checkpoint"]
    assert found.ledger.committed == undisturbed(case).ledger.committed
    assert largest_relative_difference(undisturbed(case).weights, found.weights) == 0
