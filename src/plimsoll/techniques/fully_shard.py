"""Parameters, gradients and optimizer states sharded by rows over the ranks; blocks are gathered when they compute.

    Choice(technique="fully_shard", options={"gathered": "twice", "dtype": "bf16", "offload": "disk"})

With ``gathered=once``, a block's parameters stay gathered from its forward to its backward pass. With ``twice``, they
are freed in between and gathered again.

It applies torch's FSDP2 (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) to each repeated
block, and to the remaining parameters of the model together. If one rank runs out of memory, the step is undone on all
ranks (`mechanisms.sharded`).

Numerics: sums over ranks are in another order than in one process. The option ``dtype`` also rounds embeddings, norms
and the inputs of blocks, which autocast does not round. Does NOT cover optimizers whose update of one element depends
on other elements, and weights that two blocks share. Each rank must be able to build the whole model at the start; with
``offload=disk`` it is built in files. Has NOT been run on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.errors import InputError
from plimsoll.models.hooks import UNSHARDED
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, Value
from plimsoll.techniques import technique_of
from plimsoll.techniques.autocast import Autocast
from plimsoll.techniques.mechanisms.blocks import blocks_of
from plimsoll.techniques.mechanisms.technique import Choices, Exported, Setting, Technique, by_deepspeed
from plimsoll.techniques.optimizer_offload import DEEPSPEED_PLACES, PLACES, OptimizerOffload

# Once: the parameters of a block stay gathered from its forward pass to its backward pass. Twice: they are freed in
# between, which communicates more, but at most two blocks are whole at a time.
_GATHERED = ("once", "twice")
# Values of ``dtype``. Parameters are gathered in this precision, gradients are summed in fp32 and update fp32
# parameters. Autocast stays on, and need not copy the weights of matrix products, which have its dtype already.
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BY_NUMBER = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def _zero(choice: Choice, device: Literal["cpu", "cuda"]) -> Exported:
    """Export a choice to DeepSpeed ZeRO, which always gathers each block twice."""
    zero: dict[str, Any] = {"stage": 3}
    offload = choice.options.get("offload")
    if offload in DEEPSPEED_PLACES:
        place = {"device": DEEPSPEED_PLACES[str(offload)]}
        zero |= {"offload_param": place, "offload_optimizer": place}
    note = "ZeRO stage 3 gathers parameters for forward and again for backward, which takes less memory and more time"
    precision = {name: {"enabled": True} for name in _HALVES if name == choice.options.get("dtype")}
    return Exported(precision | {"zero_optimization": zero}, note if choice.options["gathered"] == "once" else "")


def _fsdp(choice: Choice, device: Literal["cpu", "cuda"]) -> Exported:
    """Export a choice to FSDP2 in Accelerate, or to DeepSpeed if it offloads to files, which FSDP2 does not support."""
    if choice.options.get("offload") == "disk":
        return by_deepspeed(choice, device)
    precision = {"mixed_precision": choice.options["dtype"]} if choice.options.get("dtype") in _HALVES else {}
    fsdp = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": choice.options["gathered"] == "twice",
        "fsdp_offload_params": choice.options.get("offload") == "host",
    }
    return Exported(precision | {"distributed_type": "FSDP", "fsdp_config": fsdp})


def _of_trainer(choice: Choice, device: Literal["cpu", "cuda"]) -> Exported | None:
    """Export a choice to the FSDP2 arguments of `transformers.TrainingArguments`; ``None`` if it offloads to files."""
    if choice.options.get("offload") == "disk":
        return None
    precision = {name: True for name in _HALVES if name == choice.options.get("dtype")}
    fsdp = {
        "version": 2,
        "reshard_after_forward": choice.options["gathered"] == "twice",
        "cpu_offload": choice.options.get("offload") == "host",
    }
    return Exported(precision | {"fsdp": True, "fsdp_config": fsdp})


class FullyShard(Technique):
    """`Technique`: parameters, gradients and optimizer states in shards, one on each rank."""

    name = "fully_shard"
    numerics = "reordered"
    summary = "parameters, gradients and optimizer states sharded over the ranks (FSDP2)"
    modifies = frozenset({"model", "optimizer"})
    moves = frozenset({"parameters", "states"})
    reaches = frozenset({"parameters", "gradients", "optimizer states"})
    is_for_the_run = True
    not_captured = "each pass gathers parameters from other ranks"
    unoffered: ClassVar = {"dtype": "kept", "offload": "none"}
    exports: ClassVar = {"deepspeed": _zero, "accelerate": _fsdp, "transformers": _of_trainer}
    stage = "ranks"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return choices that gather blocks once, twice, or twice with offloading, in each precision the job allows."""
        reason = _why_not(workload, setting)
        if reason is not None:
            return reason
        # Offloads a rank's rows, their gradients and the states; on CUDA the update then runs on the host.
        off_device: dict[str, Value] = {"gathered": "twice", "offload": PLACES[setting.device]}
        options: tuple[dict[str, Value], ...] = ({"gathered": "once"}, {"gathered": "twice"}, off_device)
        precisions = ("fp32", "bf16") if setting.precision == "auto" else (workload.precision,)
        return tuple(
            Choice(technique=self.name, options=one | ({"dtype": precision} if precision in _HALVES else {}))
            for precision in precisions
            for one in options
        )

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if there is one rank, an option is invalid, or another technique needs whole parameters."""
        strange = [other.technique for other in others if not technique_of(other.technique).works_on_shards]
        if strange:
            return f"{strange[0]} works on whole parameters, and each rank has only some rows of them"
        if choice.options.get("offload", "none") != "none" and any(
            other.technique == OptimizerOffload.name for other in others
        ):
            return "with offload the optimizer's states are off the device already: leave optimizer_offload out"
        return _odd_option(choice, others, workload, setting) or _why_not(workload, setting)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Shard the parameters; on exit every rank has all parameters and all states again."""
        if workload.ranks.is_alone:
            raise InputError(
                f"{choice} shards a model over the ranks, and this training has 1: start several with --nproc, or "
                "leave it out"
            )
        from plimsoll.techniques.mechanisms.sharded import ShardedTraining, Sharding, mesh_of

        place = choice.options.get("offload")
        sharding = Sharding(
            keeps_gathered=choice.options["gathered"] == "once",
            dtype=_HALVES.get(str(choice.options.get("dtype"))),
            pool=(workload.files or MappedPool()) if place == "disk" else None,
            on_host=place == "host",
        )
        sharded = ShardedTraining(workload, sharding, mesh_of(workload))
        with ExitStack() as stack:
            sharded.shard()
            workload.hooks = replace(workload.hooks, sharding=sharded)
            stack.callback(_gather, workload, sharded)
            if place == "disk":  # with `host`, states are created where the rows are
                states = Choice(technique=OptimizerOffload.name, options={"to": place})
                stack.enter_context(OptimizerOffload().install(workload, states))
            yield

    def builds_outside(self, choice: Choice, device: Literal["cpu", "cuda"]) -> bool:
        """Return whether the shards are stored in files.

        Each rank then builds the whole model in files and keeps its own rows.
        """
        return device == "cpu" and choice.options.get("offload") == "disk"


def _gather(workload: Workload, sharded: Any) -> None:
    """Gather the whole model. If memory runs out, the model stays sharded, and can be saved in this form."""
    if dist.is_initialized():  # otherwise the other ranks have ended
        sharded.gather()
    workload.hooks = replace(workload.hooks, sharding=UNSHARDED)


def _odd_option(choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
    gathered, place, dtype = (choice.options.get(name) for name in ("gathered", "offload", "dtype"))
    if gathered not in _GATHERED:
        several = "fully_shard(gathered=twice,offload=disk)"
        return f"gathered is {gathered!r}: give once or twice; several options are written {several}"
    if place not in (None, "none", PLACES[setting.device]):
        return f"offload is {place!r}: on {setting.device} give {PLACES[setting.device]}, or none"
    if dtype not in (None, "kept", *_HALVES):
        return f"dtype is {dtype!r}: give bf16, fp16 or kept"
    cast_to = {
        setting.precision,
        workload.precision,
        *(one.options["dtype"] for one in others if one.technique == Autocast.name),
    }
    if dtype in _HALVES and dtype not in cast_to:
        return f"dtype is {dtype}, and the job does not compute in it: set `precision: {dtype}`"
    return None


def _why_not(workload: Workload, setting: Setting) -> str | None:
    if setting.num_ranks == 1:
        return "it shards a model over several ranks, and the job has 1 (`ranks`)"
    try:
        from plimsoll.techniques.mechanisms import sharded as _sharded  # noqa: F401 -- it uses private parts of torch's FSDP2
    except ImportError as missing:
        return f"torch {torch.__version__} lacks a part of FSDP2 that it needs ({missing}): use torch 2.13"
    if not blocks_of(workload.model):
        return "the model has no repeated blocks, which could be gathered one at a time"
    kind = type(workload.optimizer)
    if kind.__name__ not in _BY_NUMBER or getattr(torch.optim, kind.__name__, None) is not kind:
        return f"each rank updates rows of a parameter, and an update of {kind.__name__} may depend on other rows"
    if workload.optimizer.state:
        return f"the optimizer has states of {len(workload.optimizer.state)} parameters already: start a new training"
    return _fault_of(workload.model)


def _fault_of(model: nn.Module) -> str | None:
    """Return the reason why torch's FSDP2 cannot shard a model; ``None`` if it can."""
    scalars = [name for name, one in model.named_parameters() if one.ndim == 0]
    if scalars:
        return f"{scalars[0]} is a single number and has no rows: make it a tensor of shape [1]"
    owner: dict[int, str] = {}
    for name, block in blocks_of(model):
        for parameter in block.parameters():
            if owner.setdefault(id(parameter), name) != name:
                return f"{owner[id(parameter)]} and {name} share a weight, and each block is gathered separately"
    inside = {id(one) for _, block in blocks_of(model) for module in block.modules() for one in _own(module)}
    outside = {id(one) for module in _outside_blocks(model) for one in _own(module)}
    if inside & outside:
        return "a block shares a weight with a module outside the blocks, and each block is gathered separately"
    return None


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _outside_blocks(model: nn.Module) -> list[nn.Module]:
    within = {id(module) for _, block in blocks_of(model) for module in block.modules()}
    return [module for module in model.modules() if id(module) not in within]
