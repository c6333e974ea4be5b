"""A model whose parameters are torch's FSDP2 shards, so that a failure on one rank can be undone on all of them.

Every exchange of torch's goes through `_AgreedAllGather` and `_AgreedReduceScatter`: memory for it is taken first, then
the ranks ask each other whether all got here, and only then something is exchanged. A rank whose memory ran out takes
part in the next question, so that nobody waits for it (`plimsoll.ranks.Ranks.require_all`).

The optimizer has this rank's rows of each parameter as plain parameters, in the same memory as torch's shards: its
update, which works number by number, is then that of plain tensors, and is done and undone as any other.

Does NOT cover optimizers that look at a whole matrix, and a gradient scaler.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; torch 2.13's `reset_iter_state` leaves
the gradients of gathered parameters, to which the next try would add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from plimsoll.ranks import Ranks
from plimsoll.techniques._blocks import blocks_of
from plimsoll.workload import Workload

# By their names since torch 2.13, or as before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GLOO_BYTES = 2 << 20  # beside the copy; measured with 64 MiB on 2 and 4 ranks


class _AgreedAllGather(AllGather):
    """Gathers what all ranks have, when all of them are about to."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:  # type: ignore[override]
        """Take the memory before anything is agreed."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Agree, and gather; returns what to wait for."""
        _show_room(output_tensor)
        self._ranks.require_all()
        return self._ranks.exchange(lambda: _all_gather(output_tensor, input_tensor, group=group, async_op=async_op))


class _AgreedReduceScatter(ReduceScatter):
    """Adds up gradients, each rank its own rows, when all of them are about to."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:  # type: ignore[override]
        """Take the memory before anything is agreed."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Agree, and add up; returns what to wait for."""
        _show_room(input_tensor)
        self._ranks.require_all()
        return self._ranks.exchange(
            lambda: _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        )


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


class ShardedTraining:
    """The model of a workload in shards, one of them here, until `gather`.

    Args:
        workload: its model and its optimizer, which has no states yet; each rank has made the same ones.
        keeps_gathered: keep the parameters of a block from its forward pass to its backward pass.
        mesh: the ranks.
    """

    def __init__(self, workload: Workload, keeps_gathered: bool, mesh: DeviceMesh) -> None:
        self._ranks, self._model, self._optimizer = workload.ranks, workload.model, workload.optimizer
        self._keeps_gathered, self._mesh = keeps_gathered, mesh
        self._whole = dict(self._model.named_parameters())
        self._before = _AsItWas(self._model)
        self.shapes = {name: parameter.shape for name, parameter in self._whole.items()}
        self.shards: dict[str, DTensor] = {}
        self.rows: dict[str, nn.Parameter] = {}
        """This rank's rows of each parameter, by its name in the model: what the optimizer has."""

    def shard(self) -> None:
        """Leave this rank's rows of each parameter, and give the rest of the memory back."""
        modules = [block for _, block in blocks_of(self._model)]
        for module in modules:
            fully_shard(module, mesh=self._mesh, reshard_after_forward=not self._keeps_gathered)
        fully_shard(self._model, mesh=self._mesh, reshard_after_forward=False)
        gather, scatter = _AgreedAllGather(self._ranks), _AgreedReduceScatter(self._ranks)
        for module in (*modules, self._model):
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
            module.set_gradient_divide_factor(1.0)  # losses are weighted by the whole batch
            module.set_force_sum_reduction_for_comms(True)
        fully_shard.state(self._model)._lazy_init()  # type: ignore[attr-defined]  # else `reset` works after a pass only
        self.shards = {name: one for name, one in self._model.named_parameters() if isinstance(one, DTensor)}
        for name, shard in self.shards.items():
            rows = nn.Parameter(shard.to_local().detach(), requires_grad=shard.requires_grad)
            rows.is_part = True  # type: ignore[attr-defined]  # of a parameter: `plimsoll.run.reduction` leaves it out
            # Those of the rank that has most: the update is cut alike on all of them.
            rows.cut_bytes = -(-shard.shape[0] // shard.device_mesh.size()) * _row_bytes(shard)  # type: ignore[attr-defined]
            self.rows[name] = rows
        self._exchange_in_optimizer({id(self._whole[name]): rows for name, rows in self.rows.items()})
        for whole in self._whole.values():
            whole.data = torch.empty(0, dtype=whole.dtype, device=whole.device)

    def hand_over(self) -> None:
        """Give the gradients that torch has added up to the optimizer's parameters; those of all passes are there."""
        for name, shard in self.shards.items():
            gradient = shard.grad
            if gradient is not None:
                assert isinstance(gradient, DTensor)
                self.rows[name].grad = gradient.to_local()
                shard.grad = None

    def reset(self) -> None:
        """Make the model ready for another try, wherever the last one ended."""
        assert isinstance(self._model, FSDPModule)
        self._drop_gradients()
        self._model.reset_iter_state()
        self._drop_gradients()

    def clip(self, clip_norm: float) -> Tensor:
        """Clip the gradients of all ranks together; returns their norm before.

        Raises:
            PeerOutOfMemory: if memory ran out on another rank before its part was known.
        """
        gradients = [rows.grad for rows in self.rows.values() if rows.grad is not None]
        own = nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self._mesh.device_type)
        squares = own.detach().to("cpu", torch.float64).square()
        self._ranks.require_all()
        norm = self._ranks.add_up(squares).sqrt().float()
        nn.utils.clip_grads_with_norm_(self.rows.values(), clip_norm, norm)
        return norm

    def gather(self) -> None:
        """Put the whole model and the optimizer's states back, as one process has them.

        Raises:
            PeerOutOfMemory: if memory ran out on another rank.
        """
        for name, shard in self.shards.items():
            self._whole[name].data = self.whole_of(shard.to_local(), self.shapes[name])
        for name, rows in self.rows.items():
            state = self._optimizer.state.pop(rows, None)
            if state is not None:
                self._optimizer.state[self._whole[name]] = self.whole_state(state, rows, self.shapes[name])
        self._exchange_in_optimizer({id(rows): self._whole[name] for name, rows in self.rows.items()})
        self._before.restore()

    def whole_state(self, state: dict[str, Any], rows: Tensor, shape: torch.Size) -> dict[str, Any]:
        """Gather the tensors of a state that are of the size of this rank's rows."""
        return {
            key: self.whole_of(value, shape) if isinstance(value, Tensor) and value.shape == rows.shape else value
            for key, value in state.items()
        }

    @torch.no_grad()
    def whole_of(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Gather the rows that each rank has of a tensor of this shape, as `torch.chunk` has cut them."""
        world_size = self._ranks.world_size
        size = (-(-shape[0] // world_size), *shape[1:])
        own = torch.zeros(size, dtype=rows.dtype, device=rows.device)
        own[: rows.shape[0]] = rows
        every = torch.empty((size[0] * world_size, *size[1:]), dtype=rows.dtype, device=rows.device)
        whole = torch.empty(shape, dtype=rows.dtype, device=rows.device)
        _show_room(every)
        self._ranks.require_all()
        _all_gather(every, own, group=self._mesh.get_group())
        return whole.copy_(every[: shape[0]])

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take this rank's rows of whole parameters, by their names."""
        for name, rows in self.rows.items():
            rows.copy_(self.rows_of(weights[name]))

    def as_part(self, name: str, rows: Tensor) -> DTensor:
        """Return rows of this rank (a parameter's, or those of its state) as torch's part of a larger tensor."""
        whole = torch.empty(self.shapes[name], device="meta")
        return DTensor.from_local(
            rows, self._mesh, self.shards[name].placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def rows_of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor, a view."""
        size = -(-whole.shape[0] // self._ranks.world_size)
        start = min(size * self._ranks.rank, whole.shape[0])
        return whole[start : start + size]

    def _drop_gradients(self) -> None:
        for parameter in (*self._model.parameters(), *self.shards.values(), *self.rows.values()):
            parameter.grad = None

    def _exchange_in_optimizer(self, others: dict[int, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]


def _show_room(gathered: Tensor) -> None:
    """Take, and give back, what an exchange takes inside: on the processor gloo copies all that is exchanged.

    Memory may run out here, before anything is agreed, and not in the exchange.
    """
    if gathered.device.type == "cpu":
        torch.empty(gathered.nbytes + _GLOO_BYTES, dtype=torch.uint8)


def mesh_of(workload: Workload) -> DeviceMesh:
    """Return the ranks as torch's mesh of one dimension."""
    with _disable_current_modes():  # it works with real numbers, also in a rehearsal
        return init_device_mesh(workload.device.type, (workload.ranks.world_size,))


class _AsItWas:
    """The modules of a model before torch has put its classes, hooks and parameters there, for which it has no undo."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), self._kept(module)) for module in model.modules()]

    def restore(self) -> None:
        """Put back what each module had."""
        for module, kind, kept in self._modules:
            module.__class__ = kind
            for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
                vars(module).pop(key, None)
            for key, entries in kept.items():
                now = vars(module)[key]
                now.clear()
                now.update(entries)
            _composable_state._module_state_mapping.pop(module, None)

    @staticmethod
    def _kept(module: nn.Module) -> dict[str, dict[Any, Any]]:
        return {
            key: dict(entries)
            for key, entries in vars(module).items()
            if isinstance(entries, dict) and (key == "_parameters" or "_hooks" in key)
        }
