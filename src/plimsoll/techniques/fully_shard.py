"""Each rank keeps its rows of the parameters, gradients and optimizer states; blocks are gathered when they compute.

    Choice(technique="fully_shard", options={"gathered": "twice", "dtype": "bf16", "offload": "disk"})

torch's FSDP2 (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) on every repeated block, and on
what is left of the model. Memory that runs out on one rank undoes the step on all of them (`mechanisms.sharded`).

Numerics: sums over ranks are in another order than in one process. With ``dtype`` embeddings, norms and the inputs of
blocks are rounded to it as well, which autocast leaves as they are. Does NOT cover optimizers whose update of a number
depends on others, weights that two blocks share, and a model too large to be built by each rank at the start (with
``offload=disk`` it is built in files). Has NOT been run on CUDA.
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

# Once: the parameters of a block stay gathered from its forward pass to its backward pass. Twice: they are let go in
# between; more is exchanged, and no more than two blocks are whole at a time.
_GATHERED = ("once", "twice")
# Of ``dtype``, the job's precision: parameters are gathered in it, gradients are added up in fp32 and update fp32
# parameters. Autocast stays, and finds the weights of matrix products in the dtype it would make copies of them in.
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BY_NUMBER = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def _zero(choice: Choice, device: Literal["cpu", "cuda"]) -> Exported:
    """As DeepSpeed's ZeRO, which always gathers twice."""
    zero: dict[str, Any] = {"stage": 3}
    offload = choice.options.get("offload")
    if offload in DEEPSPEED_PLACES:
        place = {"device": DEEPSPEED_PLACES[str(offload)]}
        zero |= {"offload_param": place, "offload_optimizer": place}
    note = "ZeRO stage 3 gathers parameters for forward and again for backward, in less memory and more time"
    precision = {name: {"enabled": True} for name in _HALVES if name == choice.options.get("dtype")}
    return Exported(precision | {"zero_optimization": zero}, note if choice.options["gathered"] == "once" else "")


def _fsdp(choice: Choice, device: Literal["cpu", "cuda"]) -> Exported:
    """As Accelerate's FSDP2, which is the same; it has no files, and DeepSpeed has."""
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
    """As the FSDP2 of `transformers.TrainingArguments`."""
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
    summary = "parameters, gradients and optimizer states shared out over the ranks (FSDP2)"
    modifies = frozenset({"model", "optimizer"})
    moves = frozenset({"parameters", "states"})
    reaches = frozenset({"parameters", "gradients", "optimizer states"})
    is_for_the_run = True
    not_captured = "each pass gathers parameters from other ranks"
    unoffered: ClassVar = {"dtype": "kept", "offload": "none"}
    exports: ClassVar = {"deepspeed": _zero, "accelerate": _fsdp, "transformers": _of_trainer}
    stage = "ranks"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Gathered once, or twice; in the job's half precision where it has one; off the device as well."""
        reason = _why_not(workload, setting)
        if reason is not None:
            return reason
        # With the rows, their gradients and the states; on CUDA the update then runs on the host.
        off_device: dict[str, Value] = {"gathered": "twice", "offload": PLACES[setting.device]}
        options: tuple[dict[str, Value], ...] = ({"gathered": "once"}, {"gathered": "twice"}, off_device)
        precisions = ("fp32", "bf16") if setting.precision == "auto" else (workload.precision,)
        return tuple(
            Choice(technique=self.name, options=one | ({"dtype": precision} if precision in _HALVES else {}))
            for precision in precisions
            for one in options
        )

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """There must be several ranks, and nothing else that moves or replaces parameters."""
        strange = [other.technique for other in others if not technique_of(other.technique).works_on_shards]
        if strange:
            return f"{strange[0]} works on whole parameters, and each rank has some rows of them"
        if choice.options.get("offload", "none") != "none" and any(
            other.technique == OptimizerOffload.name for other in others
        ):
            return "with offload the optimizer's states are off the device already: leave optimizer_offload out"
        return _odd_option(choice, others, workload, setting) or _why_not(workload, setting)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Share the parameters out; on exit every rank has all of them, and all states, again."""
        if workload.ranks.is_alone:
            raise InputError(
                f"{choice} shares a model out over the ranks, and this training has 1: start several with --nproc, or "
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
            if place == "disk":  # on the host they are made where the rows are
                states = Choice(technique=OptimizerOffload.name, options={"to": place})
                stack.enter_context(OptimizerOffload().install(workload, states))
            yield

    def builds_outside(self, choice: Choice, device: Literal["cpu", "cuda"]) -> bool:
        """Return whether shards are in files: each rank then builds the whole model there and keeps its rows."""
        return device == "cpu" and choice.options.get("offload") == "disk"


def _gather(workload: Workload, sharded: Any) -> None:
    """Make the model whole; where memory runs out it stays shared out, and can be saved so."""
    if dist.is_initialized():  # else the others are gone, and the training with them
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
        return f"parameters are gathered in {dtype} where the job computes in it: say `precision: {dtype}`"
    return None


def _why_not(workload: Workload, setting: Setting) -> str | None:
    if setting.num_ranks == 1:
        return "it shares a model out over several ranks, and the job has 1 (`ranks`)"
    try:
        from plimsoll.techniques.mechanisms import sharded as _sharded  # noqa: F401 -- it uses what is private to torch's FSDP2
    except ImportError as missing:
        return f"torch {torch.__version__} does not have what it is made of ({missing}): use torch 2.13"
    if not blocks_of(workload.model):
        return "the model has no repeated blocks, one of which could be whole at a time"
    kind = type(workload.optimizer)
    if kind.__name__ not in _BY_NUMBER or getattr(torch.optim, kind.__name__, None) is not kind:
        return f"each rank updates rows of a parameter, and {kind.__name__} may look at more than one number at a time"
    if workload.optimizer.state:
        return f"the optimizer has states of {len(workload.optimizer.state)} parameters already: start a new training"
    return _fault_of(workload.model)


def _fault_of(model: nn.Module) -> str | None:
    """What torch's FSDP2 cannot share out, said before it is tried."""
    scalars = [name for name, one in model.named_parameters() if one.ndim == 0]
    if scalars:
        return f"{scalars[0]} is a single number and has no rows: make it a tensor of shape [1]"
    owner: dict[int, str] = {}
    for name, block in blocks_of(model):
        for parameter in block.parameters():
            if owner.setdefault(id(parameter), name) != name:
                return f"{owner[id(parameter)]} and {name} share a weight, and each block is gathered by itself"
    inside = {id(one) for _, block in blocks_of(model) for module in block.modules() for one in _own(module)}
    outside = {id(one) for module in _outside_blocks(model) for one in _own(module)}
    if inside & outside:
        return "a block shares a weight with what is in none, and each block is gathered by itself"
    return None


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _outside_blocks(model: nn.Module) -> list[nn.Module]:
    within = {id(module) for _, block in blocks_of(model) for module in block.modules()}
    return [module for module in model.modules() if id(module) not in within]
