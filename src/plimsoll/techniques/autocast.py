"""Matrix products in half precision: bf16, or fp16 with a loss scaler; parameters and reductions stay fp32.

The step runs the forward pass in ``torch.autocast`` and, with fp16, creates the ``GradScaler``. Torch decides which
ops run in half precision. The job's ``precision`` has priority: only ``auto`` leaves the choice to the plan.

An LSTM is refused if this processor has no half-precision kernels for it (`plimsoll.device.cpu.lstm_kernels`).

Does NOT cover models whose weights are in half precision, and fp16 on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from plimsoll.device.cpu.lstm_kernels import Half, lstm_fault
from plimsoll.models.workload import Precision, Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.technique import Choices, Exported, Setting, Technique


class Autocast(Technique):
    """`Technique`: autocast to a half precision."""

    name = "autocast"
    numerics = "reduced precision"
    summary = "matrix products in bf16, or in fp16 with a scaler of the loss"
    modifies = frozenset({"precision"})
    reaches = frozenset({"activations", "temporaries"})
    is_for_the_run = True
    works_on_shards = True
    may_be_faster = True
    keeps_state_between_passes = False
    exports: ClassVar = {
        "deepspeed": lambda choice, _: Exported({str(choice.options["dtype"]): {"enabled": True}}),
        "accelerate": lambda choice, _: Exported({"mixed_precision": str(choice.options["dtype"])}),
        "transformers": lambda choice, _: Exported({str(choice.options["dtype"]): True}),
    }
    stage = "precision"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return a choice of the half precision that the job sets, unless the step uses it already.

        If the job sets ``auto``, return a choice of each half precision that has kernels on the device.
        """
        if setting.precision == "fp32":
            return "the job sets precision: fp32; `precision: auto` leaves it to the plan"
        if setting.precision != "auto":
            is_there = workload.precision == setting.precision
            if setting.device == "cpu" and (fault := lstm_fault(workload.model, setting.precision)):
                return fault
            return (
                f"the job sets precision: {setting.precision}, which the step uses already"
                if is_there
                else (_choice(setting.precision),)
            )
        if any(parameter.dtype != torch.float32 for parameter in workload.model.parameters()):
            return "the model's weights are not float32: autocast would not make their products smaller"
        if setting.device == "cuda":
            return (_choice("bf16"), _choice("fp16"))
        return lstm_fault(workload.model, "bf16") or (_choice("bf16"),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the dtype differs from the job's precision, or is not suitable for a CPU."""
        dtype = choice.options.get("dtype")
        if dtype not in ("bf16", "fp16"):
            return f"dtype is {dtype}: give bf16 or fp16"
        if setting.precision not in ("auto", dtype):
            return f"the job sets precision: {setting.precision}; change it to auto or to {dtype}"
        if dtype == "fp16" and setting.device == "cpu" and setting.precision == "auto":
            return "on a CPU float16 is slower than float32 and overflows, and bf16 needs as little: give dtype=bf16"
        return lstm_fault(workload.model, _dtype(choice)) if setting.device == "cpu" else None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Set the precision of the workload."""
        before, workload.precision = workload.precision, _dtype(choice)
        try:
            yield
        finally:
            workload.precision = before

    def precision_of(self, choice: Choice) -> Precision | None:
        """Return the half precision that a choice sets, bf16 or fp16."""
        return _dtype(choice)


def _dtype(choice: Choice) -> Half:
    return "fp16" if choice.options["dtype"] == "fp16" else "bf16"


def _choice(dtype: Half) -> Choice:
    return Choice(technique=Autocast.name, options={"dtype": dtype})
