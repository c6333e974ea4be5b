"""Prediction of the peak memory of training in a user's program, before it runs.

    plimsoll.predict(model, optimizer, batch, units="next-tokens", device="rtx3060")    # a training loop with TrainStep
    plimsoll.predict_function(train, device="rtx3060")                                  # any training loop

The model may be on any device, including the meta device, because only copies of its shapes are traced. A function is
run unchanged on tensors without memory, and should run three training steps. See `plimsoll.memory.trace` for code that
cannot be traced. `plimsoll.planning.predict_job` predicts jobs. A prediction replaces torch's kernels in the
whole process, so no other thread may run torch operations during a prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plimsoll.data.batch import Units, batch_size_of
from plimsoll.device.cpu.pages import FileMappings
from plimsoll.errors import InputError
from plimsoll.memory.trace import trace_training
from plimsoll.models.workload import LossFunction, Precision, model_loss
from plimsoll.planning.dry_run.step import dry_run_step
from plimsoll.planning.targets import find_target, own_baseline
from plimsoll.records.plan import micro_batch_choice
from plimsoll.records.prediction import Prediction
from plimsoll.records.units import parse_bytes


def predict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss: LossFunction = model_loss,
    *,
    units: Units | None = None,
    micro_batch: int | None = None,
    clip_norm: float | None = None,
    precision: Precision = "fp32",
    device: str = "local",
    budget: str | int | None = None,
) -> Prediction:
    """Predict the peak memory of training with `TrainStep`.

    Args:
        model: the model. It is not changed, and its parameters need no memory (they may be on the meta device).
        optimizer: the optimizer of the model.
        batch: one batch of the largest size that the training will use, on the CPU.
        loss: see `TrainStep`, also for ``units``, ``micro_batch``, ``clip_norm`` and ``precision``.
        units: see `loss`.
        micro_batch: see `loss`.
        clip_norm: see `loss`.
        precision: see `loss`.
        device: ``"cpu"``; ``"local"``, the GPU of this machine or else its CPU; ``"cuda"``; or a GPU's name.
        budget: memory that the training may use, such as ``"8GiB"``; ``None`` is the whole device.

    Raises:
        InputError: if the model fails or cannot be traced, or the batch cannot be split. The message names the line of
            the model's code.
        DeviceError: if there is no such device.
    """
    num_samples = batch_size_of(batch)
    if micro_batch is not None and not (isinstance(micro_batch, int) and 1 <= micro_batch <= num_samples):
        raise InputError(
            f"micro_batch={micro_batch!r} is not a part of the batch of {num_samples} samples: give 1 to {num_samples}"
        )
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm={clip_norm!r} is not a valid norm: give a number above 0, or leave it out")
    target = find_target(
        device,
        None if budget is None else parse_bytes(budget),
        lambda: own_baseline(model_bytes(model, optimizer)),
    )
    trace = dry_run_step(
        model,
        optimizer,
        batch,
        loss,
        target.lowering(),
        units=units,
        choices=(micro_batch_choice(micro_batch or num_samples),),
        clip_norm=clip_norm,
        precision=precision,
    )
    tokens = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dtype == torch.int64]
    lengths = [leaf.shape[1] for leaf in tokens if leaf.dim() == 2]
    return target.predict(
        target.count(trace),
        type(model).__name__,
        precision,
        micro_batch or num_samples,
        max(lengths, default=None),
        num_samples,
    )


def predict_function(train: Callable[[], Any], *, device: str = "local", budget: str | int | None = None) -> Prediction:
    """Predict the peak memory of a function that builds a model and trains it for three steps.

    Args:
        train: plain PyTorch code. It may use ``.to("cuda")`` and ``torch.autocast("cuda")`` on a machine without a GPU.
        device: see `predict`.
        budget: see `predict`.

    Raises:
        InputError: if the function fails, cannot be traced, or never calls ``optimizer.step()``.
        DeviceError: if there is no such device.
    """
    target = find_target(device, None if budget is None else parse_bytes(budget), lambda: own_baseline(0))
    name = getattr(train, "__name__", "the function")
    trace = trace_training(lambda _: train(), target.lowering(), name)
    if "optimizer" not in trace.ops.phase:
        raise InputError(f"{name} made {len(trace.ops.name)} ops but no optimizer.step(): train three steps in it")
    return target.predict(target.count(trace), name, "as set in the function")


def model_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the host memory in bytes of a model and its optimizer states, without memory-mapped tensors."""
    in_memory = {t.untyped_storage()._cdata: t for t in _tensors_of(model, optimizer) if t.device.type == "cpu"}
    files = FileMappings()
    return sum(files.private_bytes(one) for one in in_memory.values() if not files.stays_in_file(one))


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = chain.from_iterable(state.values() for state in optimizer.state.values())
    return [*model.parameters(), *model.buffers(), *(value for value in states if isinstance(value, Tensor))]
