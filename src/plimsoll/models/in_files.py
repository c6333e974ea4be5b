"""Building a model directly in mapped files, so that its weights are never all in private memory.

    with made_in(pool):
        model = build_model(job, ...)

Ops that create tensors (``empty``, ``zeros``, ``randn`` and similar) take their memory from the pool. This memory is
filled in the same way as torch fills memory, so weights are bitwise equal to weights in private memory. Large results
of other ops, such as ``torch.randn(...) * 0.02``, are moved to the pool at once. Only one such tensor at a time is in
private memory.

In a dry run (on fake tensors), these tensors do not count as device memory.

Not handled: tensors made by other threads or without torch, and temporaries inside an op (a QR decomposition).
Transformers reads checkpoints with several threads: see `plimsoll.models.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.device.off_device import mark_outside, outside_the_device

LEAST_BYTES = 128 << 10
"""Smaller tensors stay in private memory, because in a file they would not need fewer pages."""

Fill = Callable[[Tensor, tuple[Any, ...], dict[str, Any]], object]
_ATEN = torch.ops.aten


@contextmanager
def made_in(pool: MappedPool) -> Iterator[None]:
    """Allocate from a pool the large CPU tensors that this thread creates while the block runs.

    Raises:
        OutputError: if the disk is too full for a tensor.
    """
    is_dry_run = isinstance(torch.empty(0), FakeTensor)
    with _MadeIn(pool, is_dry_run):
        yield


def _as_it_is(made: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leave the new tensor uninitialised."""


def _filled(number: int) -> Fill:
    """Return a function that fills a new tensor with an argument of the op that created it.

    It is positional argument ``number`` or, if that is absent, ``fill_value``.
    """

    def fill(made: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return made.fill_(args[number] if len(args) > number else kwargs["fill_value"])

    return fill


_FILLS: dict[Any, Fill] = {
    _ATEN.empty.memory_format: _as_it_is,
    _ATEN.empty_strided.default: _as_it_is,
    _ATEN.empty_like.default: _as_it_is,
    _ATEN.new_empty.default: _as_it_is,
    _ATEN.new_empty_strided.default: _as_it_is,
    _ATEN.zeros.default: lambda made, args, kwargs: made.zero_(),
    _ATEN.zeros_like.default: lambda made, args, kwargs: made.zero_(),
    _ATEN.new_zeros.default: lambda made, args, kwargs: made.zero_(),
    _ATEN.ones.default: lambda made, args, kwargs: made.fill_(1),
    _ATEN.ones_like.default: lambda made, args, kwargs: made.fill_(1),
    _ATEN.new_ones.default: lambda made, args, kwargs: made.fill_(1),
    _ATEN.full.default: _filled(1),
    _ATEN.full_like.default: _filled(1),
    _ATEN.new_full.default: _filled(2),
    _ATEN.randn.default: lambda made, args, kwargs: made.normal_(0, 1),
    _ATEN.randn.generator: lambda made, args, kwargs: made.normal_(0, 1, generator=kwargs.get("generator")),
    _ATEN.randn_like.default: lambda made, args, kwargs: made.normal_(0, 1),
    _ATEN.rand.default: lambda made, args, kwargs: made.uniform_(0, 1),
    _ATEN.rand.generator: lambda made, args, kwargs: made.uniform_(0, 1, generator=kwargs.get("generator")),
    _ATEN.rand_like.default: lambda made, args, kwargs: made.uniform_(0, 1),
}
"""The function that fills the result of each op that creates a tensor, as torch itself does it
(TensorFactories.cpp)."""


class _MadeIn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that allocates the results of ops from the pool. It intercepts each op below autograd."""

    def __init__(self, pool: MappedPool, is_dry_run: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool, self._is_dry_run = pool, is_dry_run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op. If its result is large, return it in memory of the pool."""
        kwargs = kwargs or {}
        fill = _FILLS.get(func)
        if fill is not None:
            return self._made(func, fill, args, kwargs)
        result = func(*args, **kwargs)
        if not any(map(_is_large, tree_leaves(result))):
            return result
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        return tree_map_only(Tensor, lambda leaf: self._moved(leaf, given), result)

    def _made(self, func: Any, fill: Fill, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self._is_dry_run:
            with outside_the_device():
                result: Tensor = mark_outside(func(*args, **kwargs))
            self._pool.know(result)
            return result
        shape: Tensor = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": False})
        asked = kwargs.get("device") or _device_of(args)
        is_here = asked.type == "cpu" and not kwargs.get("pin_memory") and shape.layout is torch.strided
        if not is_here or shape.numel() * shape.element_size() < LEAST_BYTES:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        made = self._pool.empty_like(shape)
        fill(made, args, kwargs)
        return made

    def _moved(self, result: Tensor, given: set[int]) -> Tensor:
        if not _is_large(result) or result.untyped_storage()._cdata in given or self._pool.holds(result):
            return result
        return self._pool.copy_of(result)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _is_large(leaf: Any) -> bool:
    return _is_plain(leaf) and leaf.device.type == "cpu" and leaf.untyped_storage().nbytes() >= LEAST_BYTES


def _device_of(args: tuple[Any, ...]) -> torch.device:
    """Return the device of an op without a device argument: the device of its input, or torch's default."""
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    return torch.device("cpu") if first is None else first.device
