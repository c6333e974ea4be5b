"""A dispatch mode that finds operations in a pass which a captured graph could not repeat.

A graph replays kernels on the device's memory. In these cases, a replay would reuse values of the capture:

- The host reads a value (``.item()``), or the size of a result depends on values.
- Data is copied between host and device.
- The pass uses a host tensor or a random number generator of the program.

CUDA refuses some of these cases with an error that does not name the cause, and silently accepts others.

Not detected: reads that bypass torch's dispatcher, such as numpy's and ``.tolist()``, and kernels launched by hand. If
such reads use data that the search for state reaches, the data is compared before each step
(`plimsoll.step.cuda_graphs.surroundings`).
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
"""Operators whose result size depends on values if the index is a mask."""
_READS = _aten._local_scalar_dense.default
_FRESH = _aten.lift_fresh.default  # creates a tensor from Python numbers
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_SKIPPED = ("torch.", "traceback", __name__)


class Survey(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks every operator while it is active.

    Args:
        device: the device on which the pass computes.

    Attributes:
        reason: the first obstacle to a capture; ``None`` if none was found.
        read: the values that the host has read and that depend only on Python values, in order.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self.read: list[Any] = []
        self._kind = device.type
        self._constant: set[int] = set()  # storages whose contents depend only on Python values

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run ``func``, and check its arguments and results."""
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
            # A value that depends only on Python is the same in each pass, so it may be read. For example, decoders of
            # transformers check their own position ids. A capture cannot wait for it and gets it from `ReadAgain`.
            if func is _READS and is_constant and not _is_in_backward():
                self.read.append(result)
            elif func is _READS:
                why = "hands Python a value that depends on the data"
            self.reason = None if why is None else f"{_name(func)}{_place()} {why}"
        return result

    def of(self, work: Callable[[], T]) -> T:
        """Run ``work`` under the survey and return its result."""
        with self:
            return work()

    def _seeds_of(self, returned: list[Tensor]) -> list[Tensor]:
        """Return the host scalars that an operator returned together with a device tensor.

        Attention returns the seed of its dropout for its backward pass. The seed is a host scalar, but a device tensor
        in a capture.
        """
        is_there = any(one.device.type == self._kind for one in returned)
        return [one for one in returned if is_there and one.dim() == 0 and one.device.type != self._kind]

    def _why_not_here(self, func: Any, given: list[Tensor], returned: list[Tensor]) -> str | None:
        on_host = [one for one in given if one.device.type != self._kind]
        goes_there = any(one.device.type == self._kind for one in returned)
        comes_here = len(on_host) < len(given) and any(one.device.type != self._kind for one in returned)
        # A number that is passed to a kernel as an argument is not data.
        is_number = len(on_host) < len(given) and not any(one.dim() for one in on_host) and func not in _COPIES
        if comes_here or (on_host and goes_there and not is_number):
            return "copies between the host and the device"
        if func is not _FRESH and any(_key(one) not in self._constant for one in on_host):
            return "reads a host tensor, and replays would reuse its value from the capture"
        return None


class ReadAgain(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which host reads (``.item()``) return the values of an earlier pass, without waiting."""

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = iter(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run ``func``; if it reads a value on the host, return the value of the earlier pass instead."""
        return next(self._values) if func is _READS else func(*args, **(kwargs or {}))


def _why_not(func: Any, given: list[Any]) -> str | None:
    if any(isinstance(one, torch.Generator) for one in given):
        return "draws from a random generator of the program"
    if func in _WITH_MASK:
        by_values = any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in given[1:])
    else:
        tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        by_values = func is not _READS and not tags.isdisjoint(func.tags)
    return "returns a result whose size depends on the data" if by_values else None


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _name(func: Any) -> str:
    return f"`{func._schema.name.removeprefix('aten::')}`"


def _place() -> str:
    """Return the file and line outside torch that called the operator; empty in a backward pass."""
    for frame, line in traceback.walk_stack(None):
        if not str(frame.f_globals.get("__name__", "")).startswith(_SKIPPED):
            if str(frame.f_globals.get("__name__", "")).startswith("plimsoll."):
                return ""
            return f" at {frame.f_code.co_filename.rpartition('/')[2]}:{line}"
    return ""
