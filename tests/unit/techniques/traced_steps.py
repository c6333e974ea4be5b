"""Training steps with techniques: a dry run on fake tensors and a real run, both recorded op by op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models.workload import LossFunction, model_loss
from plimsoll.planning.dry_run.step import StageBackend, _stage
from plimsoll.records.plan import Choice
from plimsoll.records.trace import Trace
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import installed

NUM_STEPS = 3


def phase_of(position: Position) -> Any:
    return "copy" if position.phase == "fetch" else position.phase


def dry_run(
    model: nn.Module,
    batch: Any,
    choices: Iterable[Choice] = (),
    lowering: Lowering | None = None,
    loss: LossFunction = model_loss,
    precision: Any = "fp32",
    *,
    evaluates: bool = False,
) -> Trace:
    """Trace three steps of SGD on fake tensors."""
    lowering, position = lowering or CpuLowering(), Position()
    with _stage(lowering, position, keeps_all=True) as stage:
        fake, optimizer = stage.fake_training(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
        stage.recorder.know_model(fake)
        step = TrainStep(
            fake, optimizer, loss, units="samples", precision=precision, backend=StageBackend(lowering.kind),
            position=position,
        )  # fmt: skip
        with installed(step.workload, choices):
            for number in range(NUM_STEPS):
                stage.recorder.step = number + 1
                step(stage.fake_batch(batch))
            if evaluates:
                step.evaluate([stage.fake_batch(batch)])
    return stage.trace()


def recorded(
    model: nn.Module,
    batch: Any,
    choices: Iterable[Choice] = (),
    loss: LossFunction = model_loss,
    precision: Any = "fp32",
    *,
    evaluates: bool = False,
) -> Trace:
    """Record three real steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    # `recut_loss` skips the check of the loss, whose memory does not belong to the steps.
    step = TrainStep(model, optimizer, loss, units="samples", precision=precision, recut_loss=True)
    recorder = Recorder(phase=lambda: phase_of(step.position))
    with recorder, installed(step.workload, choices):
        recorder.know_model(model)
        recorder.know((("", tensor) for tensor in batch.values()), "inputs")
        for number in range(NUM_STEPS):
            recorder.step = number + 1
            step(batch)
        if evaluates:
            step.evaluate([batch])
    return recorder.trace("measured", "cpu")
