"""Repeat every step of a run with the same micro-batches, without a limit and undisturbed: the bits must be identical.

    python benchmarks/_endurance_replay.py RUN

The training is built as in `plimsoll train` (`assemble`, `step_of`), and each step starts at the fallback recorded in
the run. Prints progress on standard error every hundred steps, and one JSON object at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from plimsoll.models.assemble import assemble
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan
from plimsoll.records.prepared import Prepared
from plimsoll.records.run import RunRecord
from plimsoll.step.job_step import step_of
from plimsoll.training.run_directory import RunDirectory


def main() -> None:
    """Replay the run named on the command line."""
    directory = RunDirectory.open(Path(sys.argv[1]))
    job, prepared, plan = Job.from_yaml(directory.job), Prepared.load(directory.prepared), Plan.load(directory.plan)
    parts = assemble(job, prepared, "cpu")
    step = step_of(
        job, parts.model, parts.optimizer, plan.choices_by_fallback, schedule=parts.schedule, files=parts.files
    )  # fmt: skip
    lines = RunRecord.from_directory(directory.path).finished_steps
    other_losses: list[int] = []
    other_cuts: list[int] = []
    largest_loss_difference = 0.0
    for line in lines:
        batch = parts.loader.peek()
        assert (batch.epoch, batch.first_sample) == (line.epoch, line.first_sample), line
        step.begin_again_at(line.fallback)
        result = step(batch.fields)
        parts.loader.advance()
        if result.loss != line.loss or result.gradient_norm != line.gradient_norm:
            other_losses.append(line.step)
            largest_loss_difference = max(largest_loss_difference, abs(result.loss - line.loss) / abs(line.loss))
        if (result.fallback, result.micro_batch) != (line.fallback, line.micro_batch):
            other_cuts.append(line.step)
        if line.step % 100 == 0:
            print(f"replayed {line.step} of {len(lines)} steps", file=sys.stderr, flush=True)
    parts.loader.close()
    step.close()
    newest = max(directory.checkpoints.glob("step-*"))
    then = torch.load(newest / "model.pt", weights_only=True)
    now = parts.model.state_dict()
    other_weights = [name for name, tensor in then.items() if not torch.equal(tensor, now[name])]
    square = sum(float((then[name] - now[name]).double().square().sum()) for name in other_weights)
    size = sum(float(tensor.double().square().sum()) for tensor in then.values())
    found = {"other_losses": other_losses, "other_cuts": other_cuts, "other_weights": other_weights}
    differences = {"loss_difference": largest_loss_difference, "weights_difference": (square / size) ** 0.5}
    print(json.dumps({name: len(some) for name, some in found.items()} | differences))


if __name__ == "__main__":
    main()
