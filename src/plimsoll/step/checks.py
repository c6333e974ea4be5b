"""What `plimsoll.step.train_step` refuses before anything is done, each with the reason and the remedy."""

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
    'what the loss averages over decides how the pieces of a batch are weighted: give units="next-tokens" (a causal '
    'model that shifts its labels), "tokens", "samples", or a function batch -> number'
)


def refuse_batch(batch: Any, *, has_own_loss: bool, units_are_assumed: bool) -> None:
    """Refuse a batch that a model cannot take as it is, or of which nobody said how its parts are weighted.

    Raises:
        InputError: if it is not a dict for a model that computes its own loss; see `refuse_unclear_labels`.
    """
    if not has_own_loss and not isinstance(batch, Mapping):
        raise InputError(
            f"a batch that is a {type(batch).__name__} cannot be passed to model(**batch).loss: give loss=, a "
            "function loss(model, batch) that returns the mean loss, or batches that are dicts"
        )
    if units_are_assumed:
        refuse_unclear_labels(batch)


def refuse_unclear_labels(batch: Mapping[str, Any]) -> None:
    """Refuse a batch where a sample is not one term of the mean, if nobody said what the loss averages over.

    Raises:
        InputError: if it has no tensor ``labels`` with one label for each sample, or some of them are ignored.
    """
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        raise InputError(f"a batch without a tensor `labels` (it has {', '.join(map(str, batch))}): {_CHOOSE_UNITS}")
    if labels.numel() != len(labels):
        raise InputError(f"labels of shape {tuple(labels.shape)} are several for each sample: {_CHOOSE_UNITS}")
    if num_ignored := int((labels == IGNORED_LABEL).sum()):
        raise InputError(f"{num_ignored} of {len(labels)} labels are {IGNORED_LABEL}, ignored: {_CHOOSE_UNITS}")


def refuse_no_target(shape: Shape, step: int) -> None:
    """Refuse a batch in which nothing is to be learned.

    Raises:
        DataError: if it has no units.
    """
    if shape.num_units == 0:
        raise DataError(
            f"step {step}: none of the {shape.num_samples} samples has a target (every label is -100), so there is no "
            "loss to average: remove such batches"
        )


def refuse_non_finite(what: str, value: float, workload: Workload, position: Position) -> None:
    """Refuse to update with a loss or a gradient norm that is none.

    Raises:
        NonFiniteLossError: if it is NaN or infinite.
    """
    if math.isfinite(value):
        return
    raise NonFiniteLossError(
        f"the {what} of step {position.step + 1} is {value}; the step was undone, so the model is as it was after step "
        f"{position.step}: lower the learning rate (now {workload.optimizer.param_groups[0]['lr']:g}), set clip_norm, "
        "or look at that batch"
    )


def refuse_recut(reason: Reason | None, micro_batch: int, shape: Shape, ranks: Ranks) -> None:
    """Refuse to cut a batch that must stay whole, into micro-batches or over ranks.

    Raises:
        InputError: if there is a reason, and the batch is cut.
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
    """The one device that all parameters are on, but for tables and blocks that stay on the host.

    Raises:
        InputError: if there is none, or more than one.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, HostEmbedding)}
    others = [one for one in model.parameters() if one not in tables and not is_marked(one)]
    devices = {parameter.device for parameter in others or model.parameters()}
    if len(devices) != 1:
        raise InputError(
            f"the model's parameters are on {sorted(map(str, devices)) or 'no device'}: put it on one device before "
            "making the step"
        )
    return devices.pop()


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse wrappers that train on several devices in their own way."""
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
    """Refuse what a step cannot be made of.

    ``kind`` is of the device that the step is for: a dry run's model is the CPU's whatever its target is.

    Raises:
        InputError: if the model is wrapped for several devices, the precision or the units are unknown, the model is
            in half precision under fp16, the processor has no LSTM of the precision, the optimizer needs a closure, is
            of another model or does not take its gradients, the micro-batch is no positive number of samples, or the
            loss cannot be called with a model and a batch.
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
            f"micro_batch is {micro_batch!r}, a {type(micro_batch).__name__}, but samples are counted: give a whole "
            "number or None"
        )
    if micro_batch < 1:
        raise InputError(
            f"micro_batch is {micro_batch} samples, but a pass needs at least 1: give a positive number or None"
        )


def _sparse_tables(model: nn.Module) -> dict[torch.Tensor, str]:
    """The parameters that get sparse gradients, and the modules they are of."""
    return {
        module.weight: name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, HostEmbedding) or (isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse)
    }


def _refuse_loss(loss: object) -> None:
    """Refuse torch's own losses, which compare two tensors: called with a model they fail deep inside torch."""
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
    """Refuse an optimizer that was made of another model, as one is before a copy or a wrapping.

    Under fp16 also one of some parameters only: the gradients of the others would stay scaled, and be clipped so.
    """
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = {id(parameter) for parameter in model.parameters()}
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if precision == "fp16" and updated and updated < trainable:
        raise InputError(
            f"the optimizer updates {len(updated)} of the {len(trainable)} parameters that have gradients, and under "
            "fp16 only theirs are unscaled: set requires_grad_(False) on the others, or use bf16"
        )
    if updated <= known and updated:  # the others may be left as they are on purpose
        return
    if not trainable or trainable - updated:
        raise InputError(
            f"the optimizer updates {len(updated)} parameters, of which {len(updated & known)} are among the "
            f"{len(trainable)} that the model trains: make it of this model, as in "
            "torch.optim.AdamW(model.parameters()), after the model is built and on its device"
        )
