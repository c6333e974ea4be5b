"""Each rank keeps its rows of the parameters, gradients and optimizer states; blocks are gathered when they compute.

    Choice(technique="fully_shard", options={"gathered": "once"})        or "twice"

torch's FSDP2 (`fully_shard`, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) on every repeated
block, and on what is left of the model. With ``once`` the parameters of a block stay gathered from its forward pass to
its backward pass, with ``twice`` they are let go in between and gathered again: more is exchanged, and no more than
two blocks are whole at a time. Gradients are added up block by block inside backward, and each rank updates its rows.

Memory that runs out on one rank undoes the step on all of them (`techniques._sharded`).

Numerics: the same mathematics; sums over ranks are in another order than in one process. Does NOT cover offload to the
host, gathering in bfloat16 (parameters are gathered as they are kept, and autocast), the gradient scaler of fp16,
optimizers that look at more than one number at a time, and a model too large to be built by each rank at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist

from plimsoll.errors import InputError
from plimsoll.records.plan import Choice, Numerics
from plimsoll.records.trace import Category
from plimsoll.techniques._base import Choices, Setting
from plimsoll.techniques._blocks import blocks_of
from plimsoll.workload import Workload

_GATHERED = ("once", "twice")
_BY_NUMBER = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
_TOGETHER = frozenset(
    {"micro_batch", "autocast", "attention", "checkpointing", "activation_offload", "evaluation", "heap", "allocator",
     "optimizer_kernel"}
)  # fmt: skip


class FullyShard:
    """`Technique`: parameters, gradients and optimizer states in shards, one on each rank."""

    name: ClassVar[str] = "fully_shard"
    numerics: ClassVar[Numerics] = "reordered"
    summary: ClassVar[str] = "parameters, gradients and optimizer states shared out over the ranks (FSDP2)"
    reaches: ClassVar[frozenset[Category]] = frozenset({"parameters", "gradients", "optimizer states"})
    is_for_the_run: ClassVar[bool] = True
    may_be_faster: ClassVar[bool] = False

    def menu(self, workload: Workload, setting: Setting) -> Choices | str:
        """Gathered once, or twice."""
        reason = _why_not(workload, setting)
        if reason is not None:
            return reason
        return tuple(Choice(technique=self.name, options={"gathered": gathered}) for gathered in _GATHERED)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """There must be several ranks, and nothing else that moves or replaces parameters."""
        gathered = str(choice.options["gathered"])
        if gathered not in _GATHERED:
            return f"gathered is {gathered!r}: give once or twice"
        strange = [other.technique for other in others if other.technique not in _TOGETHER]
        if strange:
            return f"{strange[0]} works on whole parameters, and each rank has some rows of them"
        return _why_not(workload, setting)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Share the parameters out; on exit every rank has all of them, and all states, again."""
        if workload.ranks.is_alone:
            raise InputError(
                f"{choice} shares a model out over the ranks, and this training has 1: start several with --nproc, or "
                "leave it out"
            )
        from plimsoll.techniques._sharded import ShardedTraining, mesh_of

        sharded = ShardedTraining(workload, choice.options["gathered"] == "once", mesh_of(workload))
        sharded.shard()
        workload.sharded = sharded
        try:
            yield
        finally:
            workload.sharded = None
            if dist.is_initialized():  # else the others are gone, and the training with them
                sharded.gather()


def _why_not(workload: Workload, setting: Setting) -> str | None:
    if setting.num_ranks == 1:
        return "it shares a model out over several ranks, and the job has 1 (`ranks`)"
    if not blocks_of(workload.model):
        return "the model has no repeated blocks, one of which could be whole at a time"
    if workload.precision == "fp16" or setting.precision == "fp16":
        return "the scaler of fp16 looks at all gradients: use precision bf16"
    kind = type(workload.optimizer)
    if kind.__name__ not in _BY_NUMBER or getattr(torch.optim, kind.__name__, None) is not kind:
        return f"each rank updates rows of a parameter, and {kind.__name__} may look at more than one number at a time"
    if workload.optimizer.state:
        return f"the optimizer has states of {len(workload.optimizer.state)} parameters already: start a new training"
    return None
