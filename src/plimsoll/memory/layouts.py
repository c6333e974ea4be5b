"""What ops give, as far as shapes and strides go: torch is asked once, and the answer is made again from what it was.

Fake tensors find what an op gives by a rule in Python or a search in a cache, which takes some 100 µs, and a recurrent
net that is unrolled has a million ops of a few hundred kinds. What an op gives anew follows from the layouts of its
tensors and from its other arguments; where these were seen before, memory of the layout it gave then is all that a
trace wants to know. A view shares memory, so the op itself runs, on shapes alone.

Covers torch's own ops (``aten``) on dense fake tensors of one mode; everything else is left to torch each time, and so
is an op whose result shares memory though it does not say so. It does NOT know values (see `plimsoll.memory.known`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten
_META = torch.device("meta")

# Each has a kernel for shapes and strides alone, and fake tensors have no rule of their own for it.
_VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.detach.default,
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.unsafe_split.Tensor,
})  # fmt: skip

_Kind = Literal["view", "new", "other"]


@dataclass(frozen=True)
class _Layout:
    """Of a tensor that has its memory for itself."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Layouts:
    """Runs ops on the fake tensors of a mode.

    Args:
        mode: the mode.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._kind_of: dict[Any, _Kind] = {}
        self._given: dict[Hashable, Any] = {}  # layouts, nested as the results; `None` where torch is asked each time
        self._state_of: dict[torch.device, dict[str, Any]] = {}

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        """Run an op; ``tensors`` are those among its arguments."""
        if not tensors or not self._are_plain(tensors):
            return op(*args, **kwargs)
        kind = self._kind_of.get(op)
        if kind is None:
            kind = self._kind_of[op] = _kind_of(op)
        if kind == "view":
            device = tensors[0].fake_device
            with in_kernel_invocation_manager(self._mode):
                result = op(*args, **kwargs)
            return _mapped(lambda view: self._fake(view, device), result)
        if kind == "other":
            return op(*args, **kwargs)
        asked = op, _signature(args), _signature((*kwargs.items(),))
        layout = self._given.get(asked)
        if layout is not None:
            with torch._C._DisableTorchDispatch():
                return _mapped(self._made, layout)
        result = op(*args, **kwargs)
        if asked not in self._given:
            self._given[asked] = _mapped(_layout_of, result) if _are_alone(result, tensors) else None
        return result

    def _are_plain(self, tensors: list[Any]) -> bool:
        """Whether all are dense and of this mode (what a library copies may have one of its own), none a constant."""
        return all(
            isinstance(one, FakeTensor)
            and one.fake_mode is self._mode
            and one.layout is torch.strided
            and one.constant is None
            and not one.dtype.is_complex  # which may be conjugated
            for one in tensors
        )

    def _made(self, layout: _Layout) -> Tensor:
        empty = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=_META)
        return self._fake(empty, layout.device)

    def _fake(self, on_meta: Tensor, device: torch.device) -> Tensor:
        """What the class of fake tensors makes of a tensor, which takes it longer than an op without memory."""
        state = self._state_of.get(device)
        if state is None:
            state = self._state_of[device] = dict(vars(FakeTensor(self._mode, on_meta, device)))
        fake = Tensor._make_subclass(  # type: ignore[attr-defined]
            FakeTensor, on_meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(state)
        return fake


def _kind_of(op: Any) -> _Kind:
    """What an op says of itself: "new" if it gives tensors, in no memory of its arguments, of a size that follows."""
    schema = op._schema
    gives_anew = (
        op.namespace == "aten"
        and torch.Tag.dynamic_output_shape not in op.tags
        and all("Tensor" in str(one.type) for one in schema.returns)
        and all(one.alias_info is None for one in (*schema.arguments, *schema.returns))
    )
    return "view" if op in _VIEWS else "new" if gives_anew else "other"


def _signature(value: Any) -> Hashable:
    """What of an argument decides the layout of a result."""
    if isinstance(value, FakeTensor):
        return value.shape, value.stride(), value.dtype, value.fake_device
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return type(value), value  # 1, 1.0 and True are equal


def _mapped(function: Callable[[Any], Any], result: Any) -> Any:
    """Apply a function to what an op gives: one thing, or a list or a tuple of which some may be missing."""
    if isinstance(result, list | tuple):
        return type(result)(_mapped(function, one) for one in result)
    return None if result is None else function(result)


def _layout_of(tensor: Any) -> _Layout:
    return _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device)


def _are_alone(result: Any, tensors: list[Any]) -> bool:
    """Whether each tensor of a result has memory of just its size, which no other and no argument has."""
    made: list[Any] = []
    _mapped(made.append, result)
    if not all(isinstance(one, FakeTensor) and one.layout is torch.strided and one.constant is None for one in made):
        return False
    storages = {one.untyped_storage()._cdata for one in (*made, *tensors)}
    of_arguments = {one.untyped_storage()._cdata for one in tensors}
    return len(storages) == len(made) + len(of_arguments) and all(map(_fills_its_memory, made))


def _fills_its_memory(tensor: Any) -> bool:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (extent if tensor.numel() else 0) * tensor.element_size()
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == num_bytes
