"""Records of a made-up classifier that was compressed, small enough to check by hand."""

from __future__ import annotations

from typing import Any

from plimsoll.records.device import Budget, Device, MemoryUse
from plimsoll.records.plan import Choice, micro_batch_plan
from plimsoll.records.run import RunRecord, StepLine
from plimsoll.records.shrink import InferenceCost, Quality, ShrinkRecord, Small, TrainingCost, Unused
from prediction_records import MIB, estimate

LAYERS = Choice(technique="layers", options={"keep": 2})
INT8 = Choice(technique="int8")


def quality(right: int, loss: float) -> Quality:
    """Return a quality with ``right`` of 200 texts."""
    return Quality(loss=loss, num_samples=200, accuracy=right / 200)


def applied(peak: int, seconds: float, speed: float = 1.0) -> InferenceCost:
    """Return the cost of a process that takes 200 MiB before it has a model."""
    return InferenceCost(
        rows=64, longest_tokens=64, peak_bytes=peak * MIB, baseline_bytes=200 * MIB, row_seconds=seconds,
        speed=speed,
        predicted=estimate(peak + 10),
    )  # fmt: skip


def shrunk(**changes: object) -> ShrinkRecord:
    """Return 16 MiB with 180 of 200 right; half of the layers lose 20, and training regains 16; int8 loses one."""
    fields: dict[str, object] = {
        "model": "runs/a/model",
        "task": "classification",
        "evaluated_on": "10% of the training data",
        "output": "small",
        "target_bytes": 4 * MIB,
        "models": (
            Small(
                form="plain", file_bytes=16 * MIB, weight_bytes=16 * MIB, quality=quality(180, 0.25),
                inference=applied(260, 0.002), training=TrainingCost(predicted=estimate(700), peak_bytes=690 * MIB),
                rejected="12.0 MiB over the target",
            ),
            Small(
                chain=(LAYERS,), form="plain", file_bytes=8 * MIB, weight_bytes=8 * MIB, quality=quality(160, 0.75),
                inference=applied(244, 0.001, 2.0), rejected="4.0 MiB over the target",
            ),
            Small(
                chain=(INT8,), form="torchao", file_bytes=5 * MIB, weight_bytes=5 * MIB, quality=quality(179, 0.26),
                inference=applied(250, 0.004, 0.5), rejected="1.0 MiB over the target",
            ),
            Small(
                chain=(LAYERS, INT8), form="torchao", file_bytes=3 * MIB, weight_bytes=3 * MIB,
                quality=quality(159, 0.76), recovered=quality(176, 0.3), recovery_steps=100,
                inference=applied(240, 0.003, 0.67),
                training=TrainingCost(
                    predicted=estimate(500), peak_bytes=480 * MIB, step_seconds=0.25, has_teacher=True
                ),
            ),
        ),
        "best": 3,
        "unused": (Unused(method="units", reason="no recurrent layers: looked for nn.LSTM, nn.GRU and nn.RNN"),),
        "saves": {"layers": "everything in proportion", "int8": "the file and the memory of linear layers, no time"},
        "seconds": 61.0,
    }  # fmt: skip
    return ShrinkRecord.model_validate(fields | changes)


def survey() -> ShrinkRecord:
    """Return a record without a target, in which no model is chosen."""
    models = tuple(model.model_copy(update={"rejected": ""}) for model in shrunk().models)
    return shrunk(target_bytes=None, best=None, models=models)


def language_model() -> ShrinkRecord:
    """Return a language model, whose perplexity is reported."""
    first = Small(form="plain", file_bytes=MIB, weight_bytes=MIB, quality=Quality(loss=0.0, num_samples=3))
    return shrunk(task="language-modeling", models=(first,), best=None, target_bytes=None, saves={})


def trained_record(*step_seconds: float, peak_bytes: int, job: dict[str, Any] | None = None) -> RunRecord:
    """Return a finished run with one step for each number of seconds."""
    use = MemoryUse(used_bytes=peak_bytes, peak_bytes=peak_bytes, reserved_bytes=0)
    steps = [
        StepLine(
            time_seconds=number, step=number, epoch=0, first_sample=0, num_samples=4, num_units=4, loss=1.0,
            learning_rate=0.1, step_seconds=seconds, micro_batch=4, peak_bytes=peak_bytes,
        )
        for number, seconds in enumerate(step_seconds, start=1)
    ]  # fmt: skip
    return RunRecord(
        name="run", job=job or {}, plan=micro_batch_plan(Budget(), (4,)), status="finished", steps=tuple(steps),
        device=Device(name="a CPU", kind="cpu", capacity_bytes=1, free_bytes=1, hardware_bytes=1, use=use),
    )  # fmt: skip
