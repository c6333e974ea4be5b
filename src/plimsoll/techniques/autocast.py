"""Matrix products in half precision: bf16, or fp16 with a scaler of the loss; parameters and reductions stay fp32.

The step runs the forward pass in ``torch.autocast`` and, with fp16, makes the ``GradScaler``; which ops run in half
precision is torch's list. Only as the job's ``precision`` says: ``auto`` leaves it to the plan, a named one is not
changed.

An LSTM goes to oneDNN, which has half-precision kernels of it for some processors only (on x86-64: for those with
AVX-512). On the others plain autocast fails in the first forward pass; here it is refused before.

Does NOT cover models whose weights are in half precision, and fp16 on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, Numerics
from plimsoll.records.trace import Category
from plimsoll.techniques.mechanisms.technique import Choices, Setting

Half = Literal["bf16", "fp16"]


class Autocast:
    """`Technique`: autocast to a half precision."""

    name: ClassVar[str] = "autocast"
    numerics: ClassVar[Numerics] = "reduced precision"
    summary: ClassVar[str] = "matrix products in bf16, or in fp16 with a scaler of the loss"
    reaches: ClassVar[frozenset[Category]] = frozenset({"activations", "temporaries"})
    is_for_the_run: ClassVar[bool] = True
    may_be_faster: ClassVar[bool] = True

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """What the device has kernels for, where the job leaves it open."""
        if setting.precision == "fp32":
            return "the job says precision: fp32; `precision: auto` leaves it to the plan"
        if setting.precision != "auto":
            is_there = workload.precision == setting.precision
            if setting.device == "cpu" and (fault := lstm_fault(workload.model, setting.precision)):
                return fault
            return (
                f"the job says precision: {setting.precision}, which the step has by itself"
                if is_there
                else (_choice(setting.precision),)
            )
        if any(parameter.dtype != torch.float32 for parameter in workload.model.parameters()):
            return "the model's weights are not float32: autocast would save nothing of their products"
        if setting.device == "cuda":
            return (_choice("bf16"), _choice("fp16"))
        return lstm_fault(workload.model, "bf16") or (_choice("bf16"),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Another precision than the job's; fp16 on a CPU."""
        dtype = choice.options.get("dtype")
        if dtype not in ("bf16", "fp16"):
            return f"dtype is {dtype}: give bf16 or fp16"
        if setting.precision not in ("auto", dtype):
            return f"the job says precision: {setting.precision}; change it to auto or to {dtype}"
        if dtype == "fp16" and setting.device == "cpu" and setting.precision == "auto":
            return "on a CPU float16 is slower than float32 and overflows, and bf16 needs as little: give dtype=bf16"
        return lstm_fault(workload.model, _dtype(choice)) if setting.device == "cpu" else None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Say the precision to the step."""
        before, workload.precision = workload.precision, _dtype(choice)
        try:
            yield
        finally:
            workload.precision = before


def lstm_fault(model: nn.Module, dtype: Half) -> str | None:
    """Say why autocast cannot run a model's LSTM on this processor; ``None`` where it can, or there is none."""
    num_layers = sum(isinstance(module, nn.LSTM) and module.proj_size == 0 for module in model.modules())
    if not num_layers or _runs_lstm(torch.bfloat16 if dtype == "bf16" else torch.float16):
        return None
    return (
        f"oneDNN has no {dtype} kernels of nn.LSTM ({num_layers} in this model) for this processor, and torch's "
        "autocast fails"
    )


@functools.cache
def _runs_lstm(dtype: torch.dtype) -> bool:
    """Whether an LSTM of a CPU runs in autocast, found out by one."""
    if not _get_current_dispatch_mode_stack():
        return _ran_lstm(dtype)
    with ThreadPoolExecutor(1) as beside:  # in a dry run: a thread has real tensors, and is no part of the trace
        return beside.submit(_ran_lstm, dtype).result()


def _ran_lstm(dtype: torch.dtype) -> bool:
    with torch.random.fork_rng(devices=[]):
        module = nn.LSTM(1, 1)
    try:
        with torch.autocast("cpu", dtype):
            module.forward(torch.zeros(1, 1, 1))  # without the hooks of all modules
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        return False
    return True


def _dtype(choice: Choice) -> Half:
    return "fp16" if choice.options["dtype"] == "fp16" else "bf16"


def _choice(dtype: Half) -> Choice:
    return Choice(technique=Autocast.name, options={"dtype": dtype})
