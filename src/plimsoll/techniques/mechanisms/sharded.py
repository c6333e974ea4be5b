"""FSDP2 sharding of a model's parameters, such that a failure on one rank can be undone on all ranks.

Every collective of FSDP2 goes through `_AgreedAllGather` or `_AgreedReduceScatter`. They allocate memory first. Then
all ranks agree that they have the memory, and only then data is exchanged. A rank that runs out of memory takes part in
the next agreement, so that no rank waits for it (`plimsoll.distributed.ranks.Ranks.require_all`).

Not handled: optimizers whose update is not elementwise.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.utils._python_dispatch import _disable_current_modes

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.distributed.ranks import Ranks
from plimsoll.models.workload import Workload
from plimsoll.techniques.mechanisms.blocks import blocks_of

# The names since torch 2.13, or the older names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ELEMENT_BITS = 44  # bits of a 64-bit integer that hold a block's number of elements
_GLOO_BYTES = 2 << 20  # memory of gloo besides its copy of the data; measured with 64 MiB on 2 and 4 ranks


class _Agreed:
    """A collective of one module, identified by a number. It starts once all ranks have allocated their memory."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks, self._number = ranks, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the result of the collective, before the ranks agree."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AgreedAllGather(_Agreed, AllGather):  # type: ignore[misc]
    """All-gather of a module's shards."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather the shards, after all ranks have confirmed that they have allocated the memory for it.

        Returns the handle to wait for, or ``None`` without ``async_op``.
        """
        _prove_memory(output_tensor)
        self._ranks.require_all(_place(self._number, output_tensor.numel(), is_sum=False))
        return self._ranks.exchange(lambda: _all_gather(output_tensor, input_tensor, group=group, async_op=async_op))


class _AgreedReduceScatter(_Agreed, ReduceScatter):  # type: ignore[misc]
    """Reduce-scatter of a module's gradients: they are summed over ranks, and each rank gets its own rows."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce-scatter the gradients, after all ranks have confirmed that they have allocated the memory for it.

        Returns the handle to wait for, or ``None`` without ``async_op``.
        """
        _prove_memory(input_tensor)
        self._ranks.require_all(_place(self._number, input_tensor.numel(), is_sum=True))
        return self._ranks.exchange(
            lambda: _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        )


def _place(number: int, num_elements: int, is_sum: bool) -> int:
    """Return a number that identifies a collective, so that ranks notice if one skips a block or some parameters."""
    return (2 * number + is_sum << _ELEMENT_BITS) + num_elements


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Sharding:
    """The way to shard a model.

    Attributes:
        keeps_gathered: whether a block's parameters stay gathered between its forward and backward pass.
        dtype: data type of gathered parameters and of the computation; ``None``: the stored dtype. With a dtype,
            gradients are reduced in fp32.
        pool: the pool of mapped files for this rank's rows and their gradients; ``None``: they are in memory.
        on_host: whether torch keeps the rows in host memory although the device is not the CPU.
    """

    keeps_gathered: bool
    dtype: torch.dtype | None = None
    pool: MappedPool | None = None
    on_host: bool = False

    def precision(self, is_block: bool) -> MixedPrecisionPolicy:
        """Return the mixed precision policy. It casts inputs of blocks, but not the model's inputs, such as labels."""
        if self.dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=is_block)

    def place(self, device: torch.device) -> OffloadPolicy:
        """Return the offload policy, which decides where torch keeps the rows."""
        return CPUOffloadPolicy(pin_memory=device.type == "cuda") if self.on_host else OffloadPolicy()


class ShardedTraining:
    """`plimsoll.models.hooks.Sharding` for a workload: the model is sharded, one shard per rank, until `gather`.

    Args:
        workload: the training. Its optimizer must have no states yet; model and optimizer must be equal on all ranks.
        sharding: the way to shard the model.
        mesh: the device mesh of all ranks.
    """

    is_sharded = True

    def __init__(self, workload: Workload, sharding: Sharding, mesh: DeviceMesh) -> None:
        self._ranks, self._model, self._optimizer = workload.ranks, workload.model, workload.optimizer
        self._sharding, self._mesh, self._device, self._files = sharding, mesh, workload.device, workload.files
        self._whole = dict(self._model.named_parameters())
        self._before = _AsItWas(self._model)
        self._in_files = {name for name, one in self._whole.items() if self._files and self._files.holds(one)}
        self.shapes = {name: parameter.shape for name, parameter in self._whole.items()}
        self.shards: dict[str, DTensor] = {}
        self.rows: dict[str, nn.Parameter] = {}
        """This rank's rows of each parameter, by the parameter's name in the model. The optimizer updates them.

        They are plain parameters in the memory of torch's shards. So the elementwise update is run and undone like any
        other.
        """

    def shard(self) -> None:
        """Keep only this rank's rows of each parameter, and free all others. If that fails, the model is unchanged."""
        with ExitStack() as undo:
            undo.callback(self._before.restore)
            self._cut()
            undo.pop_all()
        self._exchange_in_optimizer({id(self._whole[name]): rows for name, rows in self.rows.items()})
        for whole in self._whole.values():
            whole.data = torch.empty(0, dtype=whole.dtype, device=whole.device)

    def _cut(self) -> None:
        sharding, modules = self._sharding, [block for _, block in blocks_of(self._model)]
        for number, module in enumerate((*modules, self._model), start=1):
            is_block = module is not self._model
            fully_shard(
                module,
                mesh=self._mesh,
                reshard_after_forward=is_block and not sharding.keeps_gathered,
                mp_policy=sharding.precision(is_block),
                offload_policy=sharding.place(self._device),
            )
            self._agree_in(module, number)
            if sharding.pool is not None:  # torch does not know about memory-mapped files
                _move_rows(module, sharding.pool)
        fully_shard.state(self._model)._lazy_init()  # type: ignore[attr-defined]  # else `reset` fails before the first pass
        self.shards = {name: one for name, one in self._model.named_parameters() if isinstance(one, DTensor)}
        for name, shard in self.shards.items():
            if sharding.pool is not None and shard.requires_grad:
                shard.register_post_accumulate_grad_hook(_GradientMover(sharding.pool))  # type: ignore[no-untyped-call]
            rows = nn.Parameter(shard.to_local().detach(), requires_grad=shard.requires_grad)
            rows.is_part = True  # type: ignore[attr-defined]  # `plimsoll.distributed.reduction` skips parts
            # Bytes of the largest shard, so that all ranks split the update in the same way.
            rows.cut_bytes = -(-shard.shape[0] // shard.device_mesh.size()) * _row_bytes(shard)  # type: ignore[attr-defined]
            self.rows[name] = rows

    def _agree_in(self, module: nn.Module, number: int) -> None:
        """Make all ranks confirm before each collective of ``module`` that they have memory.

        ``number`` identifies the module.
        """
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(_AgreedAllGather(self._ranks, number))
        module.set_custom_reduce_scatter(_AgreedReduceScatter(self._ranks, number))
        module.set_gradient_divide_factor(1.0)  # losses are weighted by the whole batch
        module.set_force_sum_reduction_for_comms(True)

    def hand_over(self) -> None:
        """Move the gradients that torch reduced, summed over all passes, to the optimizer's parameters."""
        for name, shard in self.shards.items():
            gradient = shard.grad
            if gradient is not None:
                assert isinstance(gradient, DTensor)
                self.rows[name].grad = gradient.to_local()
                shard.grad = None

    def reset(self) -> None:
        """Prepare the model for another attempt, no matter where the last one failed."""
        assert isinstance(self._model, FSDPModule)
        self._drop_gradients()
        self._model.reset_iter_state()  # in torch 2.13 it leaves gradients of gathered parameters behind
        self._drop_gradients()

    def clip(self, parameters: Sequence[Tensor], clip_norm: float) -> Tensor:
        """Clip the gradients of all ranks by their global norm, and return the norm.

        Args:
            parameters: not used; the gradients of this rank's rows are clipped.
            clip_norm: the upper bound for the norm.

        Raises:
            PeerOutOfMemory: if another rank ran out of memory before it knew its part of the norm.
        """
        gradients = [rows.grad for rows in self.rows.values() if rows.grad is not None]
        own = nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self._mesh.device_type)
        squares = own.detach().to("cpu", torch.float64).square()
        self._ranks.require_all()
        norm = self._ranks.add_up(squares).sqrt().float()
        nn.utils.clip_grads_with_norm_(self.rows.values(), clip_norm, norm)
        return norm

    def agree_on_infinities(self, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        """Skip the update on all ranks if the gradients of any rank's rows contain infinities.

        Args:
            scaler: the scaler that has unscaled the gradients of ``optimizer`` on this rank.
            optimizer: the object that was passed to ``scaler.unscale_``.

        Raises:
            PeerOutOfMemory: if another rank ran out of memory before it checked its gradients.
        """
        found = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        is_infinite = any(bool(one.item()) for one in found)
        self._ranks.require_all()
        if self._ranks.agree(is_infinite):
            for one in found:
                one.fill_(1.0)

    def gather(self) -> None:
        """Restore the whole model and the optimizer's states, as in one process. If that fails, both are unchanged.

        Raises:
            PeerOutOfMemory: if another rank ran out of memory.
        """
        wholes = {
            name: self.whole_of(rows, self.shapes[name], name in self._in_files) for name, rows in self.rows.items()
        }
        states = {
            name: self.whole_state(self._optimizer.state[rows], rows, self.shapes[name])
            for name, rows in self.rows.items()
            if rows in self._optimizer.state
        }
        for name, rows in self.rows.items():
            self._whole[name].data = wholes[name]
            self._optimizer.state.pop(rows, None)
            if name in states:
                self._optimizer.state[self._whole[name]] = states[name]
        self._exchange_in_optimizer({id(rows): self._whole[name] for name, rows in self.rows.items()})
        self._before.restore()

    def whole_state(self, state: dict[str, Any], rows: Tensor, shape: torch.Size) -> dict[str, Any]:
        """Return a parameter's optimizer state in which tensors of the shape of ``rows`` are gathered from all ranks.

        ``rows``: this rank's rows of the parameter. ``shape``: the shape of the whole parameter.
        """
        return {
            key: self.whole_of(value, shape) if isinstance(value, Tensor) and value.shape == rows.shape else value
            for key, value in state.items()
        }

    @torch.no_grad()
    def whole_of(self, rows: Tensor, shape: torch.Size, in_files: bool = False) -> Tensor:
        """Gather the rows of all ranks into a tensor of this shape, in the order of `torch.chunk`.

        The result is on the device or, with ``in_files``, in the workload's files.
        """
        world_size, device = self._ranks.world_size, self._device
        size = (-(-shape[0] // world_size), *shape[1:])
        own = torch.zeros(size, dtype=rows.dtype, device=device)
        own[: rows.shape[0]] = rows
        every = torch.empty((size[0] * world_size, *size[1:]), dtype=rows.dtype, device=device)
        whole = every[: shape[0]] if in_files else torch.empty(shape, dtype=rows.dtype, device=device)
        if in_files:
            assert self._files is not None
            whole = self._files.empty_like(whole)
        _prove_memory(every)
        self._ranks.require_all()
        self._ranks.exchange(lambda: _all_gather(every, own, group=self._mesh.get_group()))
        return whole.copy_(every[: shape[0]])

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Copy this rank's rows from ``weights``, the whole parameters by name."""
        for name, rows in self.rows.items():
            rows.copy_(self.rows_of(weights[name]))

    def as_part(self, name: str, rows: Tensor) -> DTensor:
        """Return this rank's rows of a parameter, or of its optimizer state, as a `DTensor`."""
        spec = self.shards[name]._spec
        meta = TensorMeta(spec.shape, spec.stride, rows.dtype)
        # `from_local` would copy host tensors to the device, and values loaded into the copy would be lost.
        return DTensor(rows, replace(spec, tensor_meta=meta), requires_grad=False)  # type: ignore[no-untyped-call]

    def rows_of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor, as a view."""
        size = -(-whole.shape[0] // self._ranks.world_size)
        start = min(size * self._ranks.rank, whole.shape[0])
        return whole[start : start + size]

    def _drop_gradients(self) -> None:
        for parameter in (*self._model.parameters(), *self.shards.values(), *self.rows.values()):
            parameter.grad = None

    def _exchange_in_optimizer(self, others: dict[int, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]


class _GradientMover:
    """A hook that moves a reduced gradient to the pool, where later gradients are added to it."""

    def __init__(self, pool: MappedPool) -> None:
        self._pool = pool

    def __call__(self, shard: Tensor) -> None:
        gradient = shard.grad
        assert isinstance(gradient, DTensor)
        if not self._pool.holds(gradient._local_tensor):
            gradient._local_tensor = self._pool.copy_of(gradient._local_tensor)


def _move_rows(module: nn.Module, pool: MappedPool) -> None:
    """Move a module's rows to a pool, with the padding that torch adds up to the row count of the largest shard."""
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    groups: Iterable[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # before torch 2.12
    for group in groups:
        for one in group.fsdp_params if group is not None else ():
            padded = pool.copy_of(one._sharded_param_data)
            rows = one.sharded_param._local_tensor
            one._sharded_param_data = padded
            one.sharded_param._local_tensor = padded.view(one.padded_sharded_param_size).narrow(0, 0, rows.shape[0])


def _prove_memory(gathered: Tensor) -> None:
    """Allocate and free the memory that a collective needs internally. On the CPU, gloo copies all exchanged data.

    If memory runs out, it does so here, before the ranks agree, and not during the collective.
    """
    if gathered.device.type == "cpu":
        torch.empty(gathered.nbytes + _GLOO_BYTES, dtype=torch.uint8)


def mesh_of(workload: Workload) -> DeviceMesh:
    """Return the ranks as a one-dimensional device mesh."""
    with _disable_current_modes():  # it needs real tensors, also in a dry run
        return init_device_mesh(workload.device.type, (workload.ranks.world_size,))


class _AsItWas:
    """A snapshot of a model's modules, made before FSDP changes classes, hooks and parameters. FSDP has no undo."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), self._kept(module)) for module in model.modules()]

    def restore(self) -> None:
        """Restore all modules from the snapshot."""
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
