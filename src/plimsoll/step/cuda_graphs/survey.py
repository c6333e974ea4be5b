"""What in a pass a captured graph could not do again, seen by a dispatch mode before anything is captured.

A graph replays kernels on the device's memory. Where the host reads a value (``.item()``), where the size of a result
depends on values, where data goes between host and device, or where a tensor of the host or a generator of the
program's own is used, a replay would go on with the values of the capture. CUDA refuses some of it with an error that
names nothing, and takes the rest silently.

Does NOT see what passes torch's dispatcher by: what Python, numpy and ``.tolist()`` read, of which what can be reached
is compared before each step (`plimsoll.step.cuda_graphs.surroundings`), and kernels that are launched by hand.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

_aten = torch.ops.aten
_WITH_MASK = {_aten.index.Tensor, _aten._unsafe_index.Tensor}
"""The size of the result depends on values for a mask, and not for numbers."""
_READS = _aten._local_scalar_dense.default
_FRESH = _aten.lift_fresh.default  # a tensor of numbers that Python has
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_SKIPPED = ("torch.", "traceback", __name__)


class Survey(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks every operator while it is in force.

    Args:
        device: where the pass computes.

    Attributes:
        reason: the first that was found, ``None`` if there is none.
        read: the values that the host has read, in order, if that is all.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self.read: list[Any] = []
        self._kind = device.type
        self._constant: set[int] = set()  # storages whose contents depend on nothing but Python

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run ``func``, and look at what it was given and what it returns."""
        options = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor | torch.Generator)]
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        is_constant = func is _FRESH or (
            all(_key(one) in self._constant for one in tensors) and torch.Tag.nondeterministic_seeded not in func.tags
        )
        result = func(*args, **options)
        returned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        (self._constant.update if is_constant else self._constant.difference_update)(map(_key, returned))
        seeds = self._seeds_of(returned)
        self._constant.update(map(_key, seeds))
        if self.reason is None:
            others = [one for one in returned if not any(one is seed for seed in seeds)]
            why = _why_not(func, given) or self._why_not_here(func, tensors, others)
            # What depends on Python alone is the same in each pass, and may be read: decoders of transformers check
            # whether positions that they have counted jump. A capture cannot wait for it, and is told (`ReadAgain`).
            if func is _READS and is_constant and not _is_in_backward():
                self.read.append(result)
            elif func is _READS:
                why = "hands Python a value that depends on the data"
            self.reason = None if why is None else f"{_name(func)}{_place()} {why}"
        return result

    def of(self, work: Callable[[], T]) -> T:
        """Look at what ``work`` does, and return what it returns."""
        with self:
            return work()

    def _seeds_of(self, returned: list[Tensor]) -> list[Tensor]:
        """The numbers of the host beside a result on the device.

        Attention returns the seed of its dropout for its backward pass: a number of the host, but in a capture a tensor
        of the device.
        """
        is_there = any(one.device.type == self._kind for one in returned)
        return [one for one in returned if is_there and one.dim() == 0 and one.device.type != self._kind]

    def _why_not_here(self, func: Any, given: list[Tensor], returned: list[Tensor]) -> str | None:
        on_host = [one for one in given if one.device.type != self._kind]
        goes_there = any(one.device.type == self._kind for one in returned)
        comes_here = len(on_host) < len(given) and any(one.device.type != self._kind for one in returned)
        # A number that kernels take as an argument is no data.
        is_number = len(on_host) < len(given) and not any(one.dim() for one in on_host) and func not in _COPIES
        if comes_here or (on_host and goes_there and not is_number):
            return "copies between the host and the device"
        if func is not _FRESH and any(_key(one) not in self._constant for one in on_host):
            return "reads a tensor of the host, whose value would stay the one at the capture"
        return None


class ReadAgain(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands the host the values that it has read in an earlier pass, in order, without waiting for the device."""

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = iter(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run ``func``, unless it reads a value that is known."""
        return next(self._values) if func is _READS else func(*args, **(kwargs or {}))


def _why_not(func: Any, given: list[Any]) -> str | None:
    if any(isinstance(one, torch.Generator) for one in given):
        return "draws from a generator of the program's own"
    if func in _WITH_MASK:
        by_values = any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in given[1:])
    else:
        tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        by_values = func is not _READS and not tags.isdisjoint(func.tags)
    return "returns what depends on the data in size" if by_values else None


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _name(func: Any) -> str:
    return f"`{func._schema.name.removeprefix('aten::')}`"


def _place() -> str:
    """The line outside of torch that called the operator; of a backward pass nothing is known."""
    for frame, line in traceback.walk_stack(None):
        if not str(frame.f_globals.get("__name__", "")).startswith(_SKIPPED):
            if str(frame.f_globals.get("__name__", "")).startswith("plimsoll."):
                return ""
            return f" at {frame.f_code.co_filename.rpartition('/')[2]}:{line}"
    return ""
