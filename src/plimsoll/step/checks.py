"""Checks that `plimsoll.step.train_step` makes before any computation; each error states reason and remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.data.batch import IGNORED_LABEL
from plimsoll.device.cpu.lstm_kernels import lstm_fault
from plimsoll.device.off_device import is_marked
from plimsoll.distributed.ranks import Ranks
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.embeddings.sparse_gradients import refuse_wrong_gradients
from plimsoll.errors import DataError, InputError, NonFiniteLossError
from plimsoll.models.workload import Reason, Workload, model_loss
from plimsoll.step.micro_batches import Shape
from plimsoll.step.oom_boundary import Position

PRECISIONS = ("fp32", "bf16", "fp16")
UNITS = ("samples", "tokens", "next-tokens")


_CHOOSE_UNITS = (
    'the units that the loss averages over decide how micro-batches are weighted: give units="next-tokens" (a causal '
    'model that shifts its labels), "tokens", "samples", or a function batch -> number'
)


def refuse_batch(batch: Any, *, has_own_loss: bool, units_are_assumed: bool) -> None:
    """Refuse a batch of the wrong type, or a batch whose loss normalizer is unknown.

    Args:
        batch: the batch.
        has_own_loss: whether the user passed a loss function; if not, the model computes its loss.
        units_are_assumed: whether the user passed no ``units``, so that each sample must have one label.

    Raises:
        InputError: if the model computes its loss and the batch is not a dict; see also `refuse_unclear_labels`.
    """
    if not has_own_loss and not isinstance(batch, Mapping):
        raise InputError(
            f"a batch that is a {type(batch).__name__} cannot be passed to model(**batch).loss: give loss=, a "
            "function loss(model, batch) that returns the mean loss, or batches that are dicts"
        )
    if units_are_assumed:
        refuse_unclear_labels(batch)


def refuse_unclear_labels(batch: Mapping[str, Any]) -> None:
    """Refuse a batch unless it has exactly one label per sample, none of them ignored.

    Called if the user did not specify the loss normalizer (``units``).

    Raises:
        InputError: if the batch has no tensor ``labels`` with one label for each sample, or some labels are ignored
            (-100).
    """
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        raise InputError(f"the batch has no tensor `labels` (fields: {', '.join(map(str, batch))}): {_CHOOSE_UNITS}")
    if labels.numel() != len(labels):
        raise InputError(f"labels of shape {tuple(labels.shape)} have several values for each sample: {_CHOOSE_UNITS}")
    if num_ignored := int((labels == IGNORED_LABEL).sum()):
        raise InputError(f"{num_ignored} of {len(labels)} labels are {IGNORED_LABEL}, ignored: {_CHOOSE_UNITS}")


def refuse_no_target(shape: Shape, step: int) -> None:
    """Refuse a batch without a target.

    Raises:
        DataError: if the batch has no units that the loss could average over.
    """
    if shape.num_units == 0:
        raise DataError(
            f"step {step}: none of the {shape.num_samples} samples has a target (every label is -100), so there is no "
            "loss to average: remove such batches"
        )


def refuse_non_finite(what: str, value: float, workload: Workload, position: Position) -> None:
    """Refuse to update with a loss or gradient norm that is NaN or infinite.

    Args:
        what: the name of the value for the message, such as "loss".
        value: the value.
        workload: the training run.
        position: the current position in the training run.

    Raises:
        NonFiniteLossError: if the value is NaN or infinite.
    """
    if math.isfinite(value):
        return
    raise NonFiniteLossError(
        f"the {what} of step {position.step + 1} is {value}; the step was undone, so the model is as it was after step "
        f"{position.step}: lower the learning rate (now {workload.optimizer.param_groups[0]['lr']:g}), set clip_norm, "
        "or look at that batch"
    )


def refuse_recut(reason: Reason | None, micro_batch: int, shape: Shape, ranks: Ranks) -> None:
    """Refuse to split a batch that must stay whole into micro-batches or over ranks.

    Args:
        reason: why the batch must stay whole, or ``None``.
        micro_batch: samples per forward and backward pass.
        shape: the shape of the batch.
        ranks: the ranks that share the batch.

    Raises:
        InputError: if there is a reason, and this micro-batch size or these ranks would split the batch.
    """
    if reason is not None and not ranks.is_alone:
        raise InputError(
            f"{ranks.world_size} ranks would each have a part of the batch, but {reason.why}: train with one rank, or "
            f"{reason.remedy}"
        )
    if reason is not None and micro_batch < shape.num_samples:
        raise InputError(
            f"a micro-batch of {micro_batch} would cut the batch of {shape.num_samples} samples, but {reason.why}: "
            f"give micro_batch=None, or {reason.remedy}"
        )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters. Embeddings and blocks that stay in host memory are ignored.

    Raises:
        InputError: if the model has no parameters, or they are on several devices.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, HostEmbedding)}
    others = [one for one in model.parameters() if one not in tables and not is_marked(one)]
    devices = {parameter.device for parameter in others or model.parameters()}
    if len(devices) != 1:
        raise InputError(
            f"the model's parameters are on {sorted(map(str, devices)) or 'no device'}: put it on one device before "
            "constructing the step"
        )
    return devices.pop()


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse wrappers that implement training on several devices."""
    if isinstance(model, nn.DataParallel):
        raise InputError(
            f"DataParallel on {len(model.device_ids)} devices copies the model to all of them in every step, in one "
            "process, and gathers outputs and gradients on the first, which runs out of memory while the others are "
            "empty: give the model itself (.module), and one process per device (plimsoll train --nproc)"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InputError(
            f"{type(model).__name__} adds gradients up inside backward, where a rank that runs out of memory leaves "
            "the others waiting: give the model itself (.module), and ranks="
        )


def refuse(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: str,
    micro_batch: int | None,
    *,
    loss: object = model_loss,
    units: object = None,
    kind: str = "cpu",
) -> None:
    """Refuse arguments from which no step can be built.

    ``kind`` is the type of the device that the step is for, such as "cuda". In a dry run, the model is always on the
    CPU.

    Raises:
        InputError: if an argument is unknown or unsuitable, or the arguments do not fit together.
    """
    _refuse_loss(loss)
    _refuse_wrapped(model)
    if units is None and loss is not model_loss:
        raise InputError(f"loss= was given without units=: {_CHOOSE_UNITS}")
    if not (units is None or callable(units) or units in UNITS):
        raise InputError(
            f"units {units!r} is unknown: choose samples, tokens or next-tokens, or give a function batch -> int"
        )
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is unknown: choose fp32, bf16 or fp16")
    num_half = sum(parameter.dtype == torch.float16 for parameter in model.parameters())
    if precision == "fp16" and num_half:
        raise InputError(
            f"precision fp16 scales gradients for a model whose parameters are float32, but {num_half} of this one are "
            "float16 (model.half() or torch_dtype=float16): small updates would be lost in its weights and the scaler "
            "refuses to unscale float16 gradients; use model.float(), autocast does the rest"
        )
    if (
        precision != "fp32"
        and kind == "cpu"
        and (fault := lstm_fault(model, "bf16" if precision == "bf16" else "fp16"))
    ):
        raise InputError(f"precision {precision}: {fault}; use precision fp32, or nn.GRU")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            f"{type(optimizer).__name__} evaluates the loss several times in one step and needs a closure: use another "
            "optimizer, for example AdamW"
        )
    _refuse_foreign(model, optimizer, precision)
    refuse_wrong_gradients(optimizer, _sparse_tables(model))
    if micro_batch is None:
        return
    if not isinstance(micro_batch, int) or isinstance(micro_batch, bool):
        raise InputError(
            f"micro_batch is {micro_batch!r}, a {type(micro_batch).__name__}, but must count samples: give a whole "
            "number or None"
        )
    if micro_batch < 1:
        raise InputError(
            f"micro_batch is {micro_batch} samples, but a pass needs at least 1: give a positive number or None"
        )


def _sparse_tables(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the parameters with sparse gradients, and the names of their modules."""
    return {
        module.weight: name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, HostEmbedding) or (isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse)
    }


def _refuse_loss(loss: object) -> None:
    """Refuse torch's loss functions, which compare two tensors. Called with a model, they fail deep inside torch."""
    of_torch = {"torch.nn.modules.loss", "torch.nn.functional"}
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    if callable(loss) and getattr(kind, "__module__", None) not in of_torch:
        return
    name = getattr(kind, "__name__", repr(loss))
    raise InputError(
        f"loss is {name}, but it is called as loss(model, batch) and must return the mean loss: give a function, for "
        "example loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])"
    )


def _refuse_foreign(model: nn.Module, optimizer: torch.optim.Optimizer, precision: str) -> None:
    """Refuse an optimizer of another model, such as one created before the model was copied or wrapped.

    Under fp16 it must update all trainable parameters. The gradients of the others would stay scaled when clipped.
    """
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = {id(parameter) for parameter in model.parameters()}
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if precision == "fp16" and updated and updated < trainable:
        raise InputError(
            f"the optimizer updates {len(updated)} of the {len(trainable)} parameters that have gradients, and under "
            "fp16 only theirs are unscaled: set requires_grad_(False) on the others, or use bf16"
        )
    if updated <= known and updated:  # other parameters may be frozen on purpose
        return
    if not trainable or trainable - updated:
        raise InputError(
            f"the optimizer updates {len(updated)} parameters, of which {len(updated & known)} are among the "
            f"{len(trainable)} that the model trains: make it of this model, as in "
            "torch.optim.AdamW(model.parameters()), after the model is built and on its device"
        )
