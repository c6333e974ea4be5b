"""Placement of a model by a plan: its parts are loaded to the planned places, and streamed from there in every pass.

    with placed_model(folder, plan) as model, torch.inference_mode():
        task.compute(model, batch)

On the CPU the whole checkpoint is memory-mapped, and resident parts are copied to private memory, one tensor at a time.
Pages of other parts are read ahead of their use (`plimsoll.techniques.mechanisms.read_ahead`). They are dropped after
use if the plan expects that the page cache cannot hold them. With a GPU, blocks that do not fit are in pinned memory,
and are copied to the device when they compute (`plimsoll.techniques.mechanisms.streamed_layers`). Results do not depend
on the placement.

Does not limit memory (`plimsoll.device.base` does). The model must not be changed inside the ``with`` block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from plimsoll.device.cpu.pages import drop, stretches_of
from plimsoll.errors import DeviceError, InputError
from plimsoll.files.store import Progress, silent
from plimsoll.inference.model import require_head
from plimsoll.models.inference import inference_task
from plimsoll.models.loading import Place, load_model
from plimsoll.records.placement import InferencePlan
from plimsoll.records.units import format_bytes
from plimsoll.report.plan_sheets import budget_word
from plimsoll.techniques.mechanisms.parts import ModelPart, parts_of
from plimsoll.techniques.mechanisms.read_ahead import StreamedPart, reading_ahead
from plimsoll.techniques.mechanisms.streamed_layers import streamed
from plimsoll.weights.parts import is_made_of_parts, plain_parts


@contextmanager
def placed_model(
    folder: Path, plan: InferencePlan, progress: Progress = silent, device: str | None = None
) -> Iterator[nn.Module]:
    """Load a model as planned, and yield it. Its parts are streamed only inside the ``with`` block.

    Args:
        folder: the checkpoint that the plan was made for.
        plan: a plan that fits its budget.
        progress: called with the bytes of weights loaded so far.
        device: the device that computes, such as ``cuda:1``; ``None``: the default device of the plan's kind.

    Raises:
        InputError: if the plan does not fit its budget, belongs to another model, or the checkpoint lacks the head.
        DeviceError: if the device does not exist, or is not of the plan's kind.
        WeightsError: if the checkpoint cannot be read.
    """
    _require_fits(plan)
    head = inference_task(plan.task, folder).head
    dtype = getattr(torch, plan.dtype) if plan.is_converted else None
    chosen = _device_of(plan, device)
    is_whole = all(part.place == "device" for part in plan.parts)
    place: Place = "memory" if is_whole else "read-only"
    loaded = load_model(
        folder, head=head, dtype=dtype, device=str(chosen) if is_whole else "cpu", place=place, progress=progress
    )
    require_head(folder, head, loaded.missing)
    model = loaded.model
    parts = parts_of(model)
    _require_same(plan, parts)
    if is_whole:
        yield model
    elif plan.device_kind == "cpu":
        with _over_page_cache(parts, plan):
            yield model
    else:
        with _over_link(model, parts, plan, chosen):
            yield model


@contextmanager
def _over_page_cache(parts: Sequence[ModelPart], plan: InferencePlan) -> Iterator[None]:
    """Copy resident parts to private memory, and read other parts ahead of their use inside the ``with`` block.

    This is the placement on a CPU.
    """
    resident = plan.names_in("device")
    for part in parts:
        if part.name in resident:
            _copy_to_memory(part.weights, is_cache_tight=plan.read_bytes > 0)
    with reading_ahead(_streamed(parts, plan)):
        yield


@contextmanager
def _over_link(
    model: nn.Module, parts: Sequence[ModelPart], plan: InferencePlan, device: torch.device
) -> Iterator[None]:
    """Move resident parts to the GPU, and other blocks to pinned memory, from which they are streamed.

    They are streamed only inside the ``with`` block.
    """
    resident = plan.names_in("device")
    coded = [weight for part in parts for weight in part.weights if is_made_of_parts(weight)]
    if coded:
        raise InputError(
            f"{len(coded)} weights are quantized, but blocks of a quantized model cannot be streamed to a GPU: give a "
            "budget that holds the whole model, or a dense model"
        )
    staying = {id(weight) for part in parts if part.name in resident for weight in part.weights}
    with torch.no_grad():
        for weight in (weight for part in parts for weight in part.weights):
            weight.data = weight.detach().to(device) if id(weight) in staying else _pinned(weight, device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
    names = [part.name for part in parts if part.name not in resident]
    with streamed(model, names, device=device, is_cyclic=True):
        yield


def _pinned(weight: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a weight in pinned host memory, which a GPU can read while it computes."""
    made = torch.empty_like(weight, device="cpu", pin_memory=device.type == "cuda")
    return made.copy_(weight.detach())


def _device_of(plan: InferencePlan, asked: str | None) -> torch.device:
    name = asked or plan.device_kind
    if name.partition(":")[0] != plan.device_kind:
        raise DeviceError(
            f"the plan is for {plan.device_kind}, but the device is {name}: make it again with --device {name}"
        )
    return torch.device(name)


def _require_fits(plan: InferencePlan) -> None:
    if not plan.fits:
        least_bytes = plan.smallest_budget_bytes or 0
        raise InputError(
            f"a budget of {format_bytes(plan.budget_bytes)} cannot hold a pass of {plan.model}, which needs at least "
            f"{format_bytes(least_bytes)}: give --budget {budget_word(least_bytes)} or more"
        )


def _require_same(plan: InferencePlan, parts: Sequence[ModelPart]) -> None:
    planned = [(part.name, part.num_bytes) for part in plan.parts]
    found = [(part.name, part.num_bytes) for part in parts]
    for (planned_name, planned_bytes), (name, num_bytes) in zip(planned, found, strict=False):
        if (planned_name, planned_bytes) != (name, num_bytes):
            raise InputError(
                f"the plan is for another model: its part {planned_name} has {format_bytes(planned_bytes)}, but here "
                f"{name} has {format_bytes(num_bytes)}; make it again with `plimsoll plan --inference`"
            )
    if len(planned) != len(found):
        raise InputError(
            f"the plan is for another model: it has {len(planned)} parts, but this one has {len(found)}; make it again "
            "with `plimsoll plan --inference`"
        )


@torch.no_grad()
def _copy_to_memory(weights: Sequence[nn.Parameter], is_cache_tight: bool) -> None:
    """Copy mapped weights to private memory, one after another. Weights that share memory share it afterwards, too.

    ``is_cache_tight``: drop the file pages of each copied weight, since the page cache is needed for other parts.
    """
    copies: dict[tuple[object, ...], Tensor] = {}
    for weight in weights:
        for name, part in plain_parts(weight).items():
            mapped = part.detach()
            key = (mapped.data_ptr(), mapped.dtype, mapped.shape, mapped.stride())
            if key not in copies:
                copies[key] = mapped.clone()
                if is_cache_tight:
                    drop(stretches_of([mapped]))
            if name:
                setattr(weight, name, copies[key])
            else:
                weight.data = copies[key]


def _streamed(parts: Sequence[ModelPart], plan: InferencePlan) -> list[StreamedPart]:
    """Return the parts that every pass reads from disk: blocks, and the output layer, read after the last block."""
    streamed = plan.names_in("disk", "host")
    kept = _kept_in_cache(parts, streamed, plan)
    found, last = list[StreamedPart](), None
    for part in parts:
        last = part.module or last
        if part.name not in streamed or not part.is_streamable or last is None:
            continue
        tensors = [tensor for weight in part.weights for tensor in plain_parts(weight).values()]
        stretches, is_dropped = stretches_of(tensors), part.name not in kept
        own, following = (stretches, ()) if part.module is not None else ((), stretches)
        found.append(StreamedPart(last, own, following, is_dropped))
    return found


def _kept_in_cache(parts: Sequence[ModelPart], streamed: frozenset[str], plan: InferencePlan) -> frozenset[str]:
    """Return the names of the streamed parts that fit in the page cache together; earlier parts have priority."""
    if not plan.read_bytes:
        return streamed
    kept, free_bytes = set(), plan.cached_bytes
    for part in parts:
        if part.name in streamed and part.is_streamable and part.num_bytes <= free_bytes:
            kept.add(part.name)
            free_bytes -= part.num_bytes
    return frozenset(kept)
