"""Cache of op results on fake tensors: shapes and strides that torch has computed once are reused.

torch computes the result of an op on fake tensors by a Python rule or a cache lookup, which takes some 100 µs. An
unrolled recurrent net has a million ops of a few hundred kinds. The layout of a new result follows from the layouts of
the input tensors and from the other arguments. If these are known, a tensor with the cached layout is enough for a
trace. An op that only writes to a tensor and returns it is then skipped. A view shares memory, so the op itself runs,
on shapes alone.

Covers torch's ``aten`` ops on dense fake tensors of one mode. Other ops run in torch each time, as does an op whose
result shares memory against its schema. Does NOT know values (see `plimsoll.memory.known_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten
_META = torch.device("meta")

# Views that have a meta kernel and no special rule for fake tensors.
_VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.detach.default,
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.alias.default, aten.unbind.int, aten.split.Tensor, aten.unsafe_split.Tensor,
})  # fmt: skip

_FREE_LAYOUT = {torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}  # depends on values, or changes in place


class _Kind(NamedTuple):
    """The kind of an op, and the position and name of the argument that it writes to and returns.

    Without such an argument, the position is -1 and the name is ``""``.
    """

    name: Literal["view", "new", "writes", "other"]
    place: int = -1
    argument: str = ""


class _Layout(NamedTuple):
    """The layout of a tensor that shares its memory with no other tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Given(NamedTuple):
    """The layouts of an op's distinct result tensors, and the result with indices of layouts in place of tensors."""

    layouts: tuple[_Layout, ...]
    result: Any


# Results computed by torch in this process, by op and arguments.
_GIVEN: dict[Hashable, _Given] = {}
_ONLY_WRITE: set[Hashable] = set()


class Layouts:
    """Executor of ops on the fake tensors of a mode.

    Args:
        mode: the mode of the fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._kind_of: dict[Any, _Kind] = {}
        self._state_of: dict[torch.device, dict[str, Any]] = {}

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        """Run an op on fake tensors, or reuse the cached layout of its result.

        ``tensors`` are the tensors among its arguments.
        """
        if not self._are_plain(tensors):
            return op(*args, **kwargs)
        kind = self._kind_of.get(op)
        if kind is None:
            kind = self._kind_of[op] = _kind_of(op)
        if kind.name == "view" and tensors:
            return self._view(op, args, kwargs, tensors[0].fake_device)
        if kind.name == "new":
            return self._new(op, args, kwargs, tensors)
        if kind.name == "writes":
            return self._written(op, args, kwargs, kind)
        return op(*args, **kwargs)

    def like(self, real: Tensor) -> Tensor | None:
        """Return a fake tensor like a real, plain CPU tensor that fills its memory; ``None`` for other tensors."""
        if type(real) is not Tensor or real.requires_grad or not real.is_cpu or real.layout is not torch.strided:
            return None
        if real.dtype.is_complex or not _fills_its_memory(real):
            return None
        with torch._C._DisableTorchDispatch():
            return self._made(_Layout(tuple(real.shape), real.stride(), real.dtype, real.device))

    def _are_plain(self, tensors: list[Any]) -> bool:
        """Return whether all tensors are dense, real-valued fake tensors of this mode without constants."""
        return all(
            isinstance(one, FakeTensor)
            and one.fake_mode is self._mode
            and one.layout is torch.strided
            and one.constant is None
            and not one.dtype.is_complex  # may be conjugated
            for one in tensors
        )

    def _view(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
        with in_kernel_invocation_manager(self._mode):
            result = op(*args, **kwargs)
        return _mapped(lambda view: self._fake(view, device), result)

    def _new(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        asked = _asked(op, args, kwargs)
        given = _GIVEN.get(asked)
        if given is not None:
            with torch._C._DisableTorchDispatch():
                made = [self._made(layout) for layout in given.layouts]
            return _mapped(made.__getitem__, given.result)
        result = op(*args, **kwargs)
        found: dict[int, Any] = {}  # by identity, in order
        _mapped(lambda one: found.setdefault(id(one), one), result)
        if _are_alone([*found.values()], tensors):
            numbers = {identity: number for number, identity in enumerate(found)}
            layouts = tuple(map(_layout_of, found.values()))
            _GIVEN[asked] = _Given(layouts, _mapped(lambda one: numbers[id(one)], result))
        return result

    def _written(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: _Kind) -> Any:
        returned = None
        if kind.argument:
            returned = args[kind.place] if kind.place < len(args) else kwargs[kind.argument]
        asked = _asked(op, args, kwargs)
        if asked in _ONLY_WRITE:
            return returned
        result = op(*args, **kwargs)
        if result is returned and asked == _asked(op, args, kwargs):
            _ONLY_WRITE.add(asked)  # else an argument was resized, for example
        return result

    def _made(self, layout: _Layout) -> Tensor:
        empty = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=_META)
        return self._fake(empty, layout.device)

    def _fake(self, on_meta: Tensor, device: torch.device) -> Tensor:
        """Return the fake tensor that the constructor of its class would make, but faster.

        The constructor would take most of the time of a cached op.
        """
        state = self._state_of.get(device)
        if state is None:
            state = self._state_of[device] = dict(vars(FakeTensor(self._mode, on_meta, device)))
        fake = Tensor._make_subclass(FakeTensor, on_meta, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(state)
        return fake


def _kind_of(op: Any) -> _Kind:
    """Return the kind of an op, according to its schema.

    "new" returns tensors of a computable size that share no memory with arguments. "writes" writes to one tensor and
    returns it, or writes to lists of tensors and returns nothing, as the ops of optimizers do.
    """
    arguments, returns = op._schema.arguments, op._schema.returns
    shared = [one for one in (*arguments, *returns) if one.alias_info is not None]
    if op in _VIEWS:
        return _Kind("view")
    if op.namespace != "aten" or not _FREE_LAYOUT.isdisjoint(op.tags):
        return _Kind("other")
    if not shared and all("Tensor" in str(one.type) for one in returns):
        return _Kind("new")
    if not returns and shared and all(one.alias_info.is_write for one in shared):
        return _Kind("writes")
    if len(shared) == 2 and shared[1:] == returns and all(_is_written(one) for one in shared):
        place = arguments.index(shared[0])
        return _Kind("writes", place, arguments[place].name)
    return _Kind("other")


def _is_written(one: Any) -> bool:
    return str(one.type) == "Tensor" and one.alias_info.is_write


def _asked(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return the cache key of a call. It includes the default dtype, which results of Python numbers may have."""
    return op, torch.get_default_dtype(), _signature(args), _signature((*kwargs.items(),))


def _signature(value: Any) -> Hashable:
    """Return the properties of an argument that determine the layout of a result."""
    if isinstance(value, FakeTensor):
        return value.shape, value.stride(), value.dtype, value.fake_device
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return type(value), value  # 1, 1.0 and True are equal


def _mapped(function: Callable[[Any], Any], result: Any) -> Any:
    """Apply a function to each tensor in a result, which may be nested in lists and tuples and contain None."""
    if isinstance(result, list | tuple):
        return type(result)(_mapped(function, one) for one in result)
    return None if result is None else function(result)


def _layout_of(tensor: Any) -> _Layout:
    return _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device)


def _are_alone(made: list[Any], tensors: list[Any]) -> bool:
    """Return whether each tensor in ``made`` fills its memory and shares it with no other tensor or argument."""
    if not all(isinstance(one, FakeTensor) and one.layout is torch.strided and one.constant is None for one in made):
        return False
    of_arguments = {one.untyped_storage()._cdata for one in tensors}
    storages = {one.untyped_storage()._cdata for one in made} - of_arguments
    return len(storages) == len(made) and all(map(_fills_its_memory, made))


def _fills_its_memory(tensor: Any) -> bool:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (extent if tensor.numel() else 0) * tensor.element_size()
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == num_bytes)


GROUPED = aten._grouped_mm.default
_ALIGNED_BYTES = 16


def grouped_result(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return an empty result of ``_grouped_mm`` (mixture of experts). Does not cover the scaled 8-bit version."""
    # torch's rule for fake tensors supports only bfloat16. The kernels support every type, and align rows to 16 bytes.
    shape = _grouped_shape(a, b, offs)
    per_row = _ALIGNED_BYTES // a.element_size()
    padded = -(-shape[-1] // per_row) * per_row
    strides = (shape[-2] * padded, padded, 1)[-len(shape) :]
    made: Tensor = aten.empty_strided.default(shape, strides, dtype=a.dtype, device=a.device)
    return made


def _grouped_shape(a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[int, ...]:
    """Return the shape of a result: groups divide the rows of ``a``, the columns of ``b``, or the summed dimension."""
    if a.dim() == b.dim() == 2:
        assert offs is not None
        return (offs.shape[0], a.shape[0], b.shape[1])
    if a.dim() == b.dim() == 3:
        return (a.shape[0], a.shape[1], b.shape[2])
    return (a.shape[-2], b.shape[-1])
