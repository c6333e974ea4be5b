"""Work of an op, from which its time is predicted: floating-point operations, and bytes read and written.

    flops, moved_bytes, outside_bytes, dtype = WorkCounter(on_host).count(op, args, kwargs, result)

Floating-point operations are counted for matrix products only, with torch's formulas and formulas for oneDNN's and
cuDNN's recurrent layers. The time of other ops follows from their bytes. Bytes count the tensors that an op reads or
writes. Views move nothing, and an op that selects rows of a tensor moves only those rows. Scratch memory of kernels is
not counted.

An exchange between ranks moves the whole gathered tensor; its time depends on the link between the ranks.

If a lowering runs no op for a product of the target (cuDNN's recurrent layers), it records the product with `add_work`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_MOVE_NOTHING = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_", "resize_",
    "lift_fresh", "detach", "_local_scalar_dense", "sym_size", "record_stream",
}  # fmt: skip
# Arguments that an op writes or only inspects, but does not read in full.
_FIRST, _SECOND = frozenset({0}), frozenset({1})
_NOT_READ = {
    **dict.fromkeys(
        ("zero_", "fill_", "copy_", "bernoulli_", "normal_", "uniform_", "exponential_", "random_"), _FIRST
    ),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "rand_like", "randn_like"), _FIRST),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "_foreach_zero_", "_foreach_copy_"), _FIRST),
    **dict.fromkeys(("embedding", "index_select", "gather", "index", "nll_loss_forward", "nll_loss2d_forward"), _FIRST),
    **dict.fromkeys(("index_put_", "index_add_", "scatter_", "scatter_add_", "_index_put_impl_"), _FIRST),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _SECOND),
}
# Ops that read as many bytes of the source as they return (selected rows), and ops that write some positions of an
# argument.
_READS_AS_IT_WRITES = {"embedding", "index_select", "gather", "index"}
_WRITES_IN_PLACES = {"index_put_", "index_add_", "scatter_", "scatter_add_", "_index_put_impl_"}

# The position of the whole tensor among the arguments of an exchange between ranks.
_WHOLE_AT = {"c10d::allreduce_": 0, "c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}
_COPIES_ROWS_IN = "fsdp::all_gather_copy_in"  # copies this rank's rows into the whole tensor, which is not read

Flops = Callable[[tuple[Any, ...], dict[str, Any], Any], int]

_NONE = (0, 0)
_NESTED = (list, tuple)
_said: ContextVar[tuple[int, int] | None] = ContextVar("said", default=None)  # None while no recorder counts


def add_work(flops: int, moved_bytes: int) -> None:
    """Add floating-point operations of matrix products, and the bytes that they move, to the work of the next op."""
    said = _said.get()
    if said is not None:
        _said.set((said[0] + flops, said[1] + moved_bytes))


@contextmanager
def hearing() -> Iterator[None]:
    """Collect the work reported by `add_work` inside the block.

    Outside such blocks, this work is discarded, because it would be added to the first op of the next record.
    """
    before = _said.get()
    _said.set(_NONE)
    try:
        yield
    finally:
        _said.set(before)


class Work(NamedTuple):
    """Work of one op: floating-point operations, and bytes that it moves in device memory and outside the device.

    ``dtype`` is the type of the first floating-point tensor of an op with matrix products; "" for other ops.
    """

    flops: int
    moved_bytes: int
    outside_bytes: int
    dtype: str


NO_WORK = Work(0, 0, 0, "")


class _Kind(NamedTuple):
    """Properties of an op that are the same for all its calls.

    ``moves``: whether calls read or write memory. ``not_read`` and ``written``: positions of arguments that are not
    read, or are written. ``writes_result``: whether the result is new memory. ``reads_as_it_writes``: whether the
    result is also read. ``flops``: counts the floating-point operations; ``None`` for an op without matrix
    products.
    """

    moves: bool
    not_read: frozenset[int]
    written: frozenset[int]
    writes_result: bool
    reads_as_it_writes: bool
    flops: Flops | None
    only: tuple[int, int] | None
    """If only one argument counts: its position, and how often it is moved."""


class WorkCounter:
    """Counter of the work of ops.

    Args:
        on_host: returns whether a tensor is outside the device.
    """

    def __init__(self, on_host: Callable[[Tensor], bool]) -> None:
        self._on_host = on_host
        self._kinds: dict[Any, _Kind] = {}

    def count(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
        """Return the work of one completed call of an op."""
        kind = self._kinds.get(op)
        if kind is None:
            kind = self._kinds[op] = _kind_of(op)
        flops, said_bytes = _said.get() or _NONE
        if flops:
            _said.set(_NONE)
        if not kind.moves:
            return Work(flops, said_bytes, 0, _dtype_of(result)) if flops else NO_WORK
        with torch._C.DisableTorchFunction():
            if kind.flops is not None:
                flops += kind.flops(args, kwargs, result)
            moved_bytes, outside_bytes = self._moved(kind, args, kwargs, result)
            return Work(flops, moved_bytes + said_bytes, outside_bytes, _dtype_of((*args, result)) if flops else "")

    def _moved(self, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
        sizes = [0, 0]
        if kind.only is not None:
            self._add(sizes, args[kind.only[0]], kind.only[1])
            return sizes[0], sizes[1]
        for position, arg in enumerate(args):
            times = (position not in kind.not_read) + (position in kind.written)
            if times and arg is not None:
                self._add(sizes, arg, times)
        for value in kwargs.values():
            self._add(sizes, value, 1)
        if kind.writes_result:
            self._add(sizes, result, 2 if kind.reads_as_it_writes else 1)
        return sizes[0], sizes[1]

    def _add(self, sizes: list[int], value: Any, times: int) -> None:
        if isinstance(value, Tensor):
            sizes[self._on_host(value)] += times * _num_bytes(value)
        elif isinstance(value, _NESTED):
            for inner in value:
                self._add(sizes, inner, times)


def _num_bytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return _num_bytes(tensor._values()) if tensor.layout is torch.sparse_coo else 0
    return tensor.nbytes


@cache
def _text_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(values: Any) -> str:
    for value in values if isinstance(values, Iterable) and not isinstance(values, Tensor) else (values,):
        if isinstance(value, Tensor) and value.is_floating_point():
            return _text_of(value.dtype)
    return ""


def _kind_of(op: Any) -> _Kind:
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    aliases = {number: one.alias_info for number, one in enumerate(schema.arguments) if one.alias_info is not None}
    written = frozenset(number for number, alias in aliases.items() if alias.is_write)
    is_view = bool(aliases) and not written
    return _Kind(
        moves=not is_view and name not in _MOVE_NOTHING,
        not_read=_NOT_READ.get(name, frozenset()),
        written=frozenset() if name in _WRITES_IN_PLACES else written,
        writes_result=not any(one.alias_info is not None for one in schema.returns),
        reads_as_it_writes=name in _READS_AS_IT_WRITES,
        flops=_flops_of(op, name),
        only=(0, 2) if name == _COPIES_ROWS_IN else (_WHOLE_AT[name], 1) if name in _WHOLE_AT else None,
    )


def _flops_of(op: Any, name: str) -> Flops | None:
    own = _OWN_FLOPS.get(name)
    if own is not None:
        return own
    formula = flop_registry.get(op.overloadpacket)
    if formula is None:
        return None
    return lambda args, kwargs, result: int(formula(*args, **kwargs, out_val=result))


def _attention_flops(args: tuple[Any, ...]) -> int:
    """Return the floating-point operations of attention; several query heads may share a key head."""
    (*batch, queries, width), (keys, value_width) = args[0].shape, args[2].shape[-2:]
    flops: int = 2 * torch.Size(batch).numel() * queries * keys * (width + value_width)
    return flops


def rnn_flops(num_steps: int, batch_size: int, num_inputs: int, hidden_size: int, num_gates: int) -> int:
    """Return the floating-point operations of a recurrent layer's matrix products, for forward in one direction."""
    return 2 * num_steps * batch_size * num_gates * hidden_size * (num_inputs + hidden_size)


def _mkldnn_flops(args: tuple[Any, ...]) -> int:
    """Return the floating-point operations of ``mkldnn_rnn_layer(input, w_ih, w_hh, b_ih, b_hh, hx, ...)``.

    The arguments of the backward op begin with the same tensors.
    """
    num_steps, batch_size, num_inputs = args[0].shape
    num_rows, hidden_size = args[2].shape
    # Each time step reads all weights again, which takes about as long as the products of one more sample. Measured
    # with 128 and 512 units, relative to the rate of large batches: 0.42 and 0.53 for a batch of 1, 0.70 and 0.77 for
    # 2, 1.0 and 0.86 for 8.
    return rnn_flops(num_steps, batch_size + 1, num_inputs, hidden_size, num_rows // hidden_size)


# torch does not count attention on the CPU. Up to torch 2.11, it counts none with fewer key heads than query heads.
_ATTENTION = tuple(
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)
_OWN_FLOPS: dict[str, Flops] = {
    "_grouped_mm": lambda args, kwargs, result: grouped_flops(*args[:2]),
    "mkldnn_rnn_layer": lambda args, kwargs, result: _mkldnn_flops(args),
    "mkldnn_rnn_layer_backward": lambda args, kwargs, result: 2 * _mkldnn_flops(args),
    **{name: lambda args, kwargs, result: _attention_flops(args) for name in _ATTENTION},
    # The scores are recomputed, and gradients of query, key, value and attention weights are added.
    **{f"{name}_backward": lambda args, kwargs, result: 5 * _attention_flops(args[1:]) // 2 for name in _ATTENTION},
}


def grouped_flops(a: Tensor, b: Tensor) -> int:
    """Return the floating-point operations of a grouped product: each row is multiplied by its group's matrix only."""
    num_times = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * num_times * a.shape[-2] * a.shape[-1] * b.shape[-1]
