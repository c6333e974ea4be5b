"""Values of tensors that a trace needs although nothing is computed: masks, lengths, positions and derived values.

A fake tensor has a shape but no values. Models ask for values nevertheless: whether a mask has padding, or how long
each sequence is. The integers of a batch are known. Each op on known integers therefore also runs on the real, small
tensors (at most `MOST_ELEMENTS`). If an unknown value is requested (a loss, a gradient norm, a router's choice), the
result is 0, or as many elements as possible. ``assumptions`` records each such result. Random numbers are almost 1, so
that layer dropout skips no layer. The trace then needs as much memory as the largest step of a long run.

Does NOT compute floating-point values, except of tensors with few elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from plimsoll.errors import InputError
from plimsoll.memory.layouts import GROUPED, Layouts, grouped_result
from plimsoll.memory.lowering.base import tensors_in
from plimsoll.records.trace import Assumption

MOST_ELEMENTS = 1 << 22
_MOST_FLOATING = 4096
_ATTRIBUTE = "_plimsoll_known"  # attribute of a fake tensor: the real tensor with its values


def values_of(tensor: Tensor) -> list[int]:
    """Return the integers in a one-dimensional tensor, fake or real.

    Raises:
        InputError: if the tensor is fake and its values are not known.
    """
    known = known_of(tensor)
    if known is None:
        raise InputError(
            f"the values of a tensor of shape {list(tensor.shape)} decide how much memory is needed, and they are not "
            "known before the run: use lengths that follow from the batch's integers (masks, lengths), or fixed ones"
        )
    with _disable_current_modes():
        values: list[int] = known.tolist()
    return values


def known_of(tensor: Tensor) -> Tensor | None:
    """Return a real tensor with the values of a fake or real one; ``None`` if they are not known."""
    known: Tensor | None = getattr(tensor, _ATTRIBUTE, None) if isinstance(tensor, FakeTensor) else tensor
    return known


aten = torch.ops.aten
_FACTORIES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.scalar_tensor.default,
    aten.rand.default,
    aten.lift_fresh.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
}
_ALMOST_ONE = 1 - 2**-8  # also in bfloat16
_LIFTS = {aten.lift_fresh.default, aten.lift.default}  # the ops that `torch.tensor` runs on numbers

KEEPS_ALL = "was assumed to keep every element"
"""Part of the text of an assumption about a result whose length depends on unknown values."""


def _longest_of_mask(tensor: Tensor, mask: Tensor) -> tuple[int, ...]:
    shape = zip(tensor.shape, mask.shape, strict=True) if tensor.dim() == mask.dim() else ((tensor.numel(), 1),)
    return (prod(map(max, shape)),)


# Shapes and types of the results if every element is kept; a type of None is the type of the first argument.
_UNKNOWN_LENGTH: dict[Any, Callable[..., list[tuple[tuple[int, ...], torch.dtype | None]]]] = {
    aten.nonzero.default: lambda tensor: [((tensor.numel(), tensor.dim()), torch.int64)],
    aten.masked_select.default: lambda tensor, mask: [(_longest_of_mask(tensor, mask), None)],
    aten._unique2.default: lambda tensor, sorted=True, with_inverse=False, with_counts=False: [
        ((tensor.numel(),), None),
        (tuple(tensor.shape) if with_inverse else (0,), torch.int64),
        ((tensor.numel(),) if with_counts else (0,), torch.int64),
    ],
}


class KnownValues:
    """Executor of ops on fake tensors, which also tracks known values.

    Args:
        mode: the mode of the fake tensors.
        where: returns a description of the code that requests a value, or ``None`` to record no assumption.
        keeps_all: whether a result of unknown length keeps all elements, or only a single element.
    """

    def __init__(self, mode: FakeTensorMode, where: Callable[[], str | None], keeps_all: bool = True) -> None:
        self._mode = mode
        self._layouts = Layouts(mode)
        self._keeps_all = keeps_all
        self._of_outside: dict[int, tuple[Tensor, Tensor]] = {}
        self._where = where
        # Storages of real tensors that the training has overwritten with unknown values, while they are alive.
        self._wrong: dict[int, weakref.ref[Any]] = {}
        self._assumed: dict[str, Assumption] = {}

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Assumptions made in place of unknown values."""
        return tuple(self._assumed.values())

    def assume(self, text: str, low_bytes: int = 0, high_bytes: int = 0) -> None:
        """Record an assumption. If it is recorded already, its range of bytes is widened to include the new range."""
        old = self._assumed.get(text, Assumption(text=text))
        self._assumed[text] = Assumption(
            text=text, low_bytes=min(low_bytes, old.low_bytes), high_bytes=max(high_bytes, old.high_bytes)
        )

    def fake(self, real: Tensor) -> Tensor:
        """Return a fake CPU tensor like ``real``, which may be on any device; integers of a CPU tensor stay known."""
        if isinstance(real, FakeTensor):
            return real
        if real.device.type != "cpu":  # a fake tensor of another device cannot be trained on a CPU build of torch
            with self._mode:
                return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        with _disable_current_modes():
            tensor = self._mode.from_tensor(real.detach(), static_shapes=True)
            # A copy, because writes of the training must not reach the real tensor. A single floating-point number may
            # be an optimizer's step count, by which it divides.
            if real.numel() <= (1 if real.is_floating_point() else MOST_ELEMENTS):
                setattr(tensor, _ATTRIBUTE, real.detach().clone())
        return tensor

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on fake tensors, and on known values if all its inputs are known."""
        if op is aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if op is aten._pin_memory.default:  # a copy, as far as memory is concerned
            op, args = aten.clone.default, args[:1]
        tensors = tensors_in((*args, *kwargs.values()))
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors) and op not in _LIFTS:
            self._refuse_to_train(op, args)
            args, kwargs = tree_map(self._adopted, (args, kwargs))
            tensors = tensors_in((*args, *kwargs.values()))
        known = [self._value(tensor) is not None for tensor in tensors]
        is_known = (all(known) if tensors else op in _FACTORIES) and op.overloadpacket is not aten.set_
        is_known = is_known and (op is aten.rand.default or torch.Tag.nondeterministic_seeded not in op.tags)
        if is_known and torch.Tag.dynamic_output_shape in op.tags:
            real = self._really(op, args, kwargs)
            return tree_map(lambda value: self.fake(value) if isinstance(value, Tensor) else value, real)
        if op in _LIFTS and (lifted := self._layouts.like(args[0])) is not None:
            result = lifted
        elif op in _UNKNOWN_LENGTH:
            result = self._unknown_length(op, args, kwargs)
        elif op is GROUPED:
            result = grouped_result(*args, **kwargs)
        else:
            result = self._layouts.run(op, args, kwargs, tensors)
        if not any(known) and not is_known:
            return result
        made = [one for one in tensors_in((result,)) if isinstance(one, FakeTensor)]
        if not is_known or not all(map(_is_small, made or tensors)):
            self._forget_written(op, args)
            return result
        for fake, value in zip(made, tensors_in((self._really(op, args, kwargs),)), strict=True):
            setattr(fake, _ATTRIBUTE, value)
        return result

    def _really(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is aten.rand.default:
            op, args = aten.full.default, (*args, _ALMOST_ONE)
        real_args = self._real(args)
        real_kwargs = {name: self._real(value) for name, value in kwargs.items()}
        with _below_modes(tensors_in((*real_args, *real_kwargs.values()))), torch.no_grad():
            return op(*real_args, **real_kwargs)

    def _real(self, value: Any) -> Any:
        """Return an argument with known values in place of fake tensors."""
        if isinstance(value, Tensor):
            return self._value(value)
        return type(value)(map(self._real, value)) if isinstance(value, list | tuple) else value

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return the real tensor with the values of a fake one; ``None`` if they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value: Tensor | None = getattr(tensor, _ATTRIBUTE, None)
        if value is not None and self._wrong:
            wrong = self._wrong.get(value.untyped_storage()._cdata)
            if wrong is not None and wrong() is not None:
                return None
        return value

    def _scalar(self, tensor: Tensor) -> Any:
        value = self._value(tensor)
        if value is not None:
            with _below_modes((value,)):
                return value.item()
        where = self._where()
        if where is not None:
            self.assume(f"the value of a {str(tensor.dtype).removeprefix('torch.')} tensor was assumed to be 0{where}")
        return _zero(tensor.dtype)

    def _unknown_length(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return results of an op that may drop elements: with all elements if ``keeps_all``, else with one at most."""
        self.assume(f"{op} {KEEPS_ALL}{self._where() or ''}")
        results = []
        for (length, *rest), dtype in _UNKNOWN_LENGTH[op](*args, **kwargs):
            kept = length if self._keeps_all else min(length, 1)
            like = {"dtype": dtype or args[0].dtype, "device": args[0].device}
            results.append(aten.empty.memory_format((kept, *rest), **like))
        return results[0] if len(results) == 1 else tuple(results)

    def _adopted(self, value: Any) -> Any:
        """Return the fake tensor that always represents this real tensor, which comes from outside the training."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) not in self._of_outside:
            self._of_outside[id(value)] = value, self.fake(value)
        return self._of_outside[id(value)][1]

    def _refuse_to_train(self, op: Any, args: tuple[Any, ...]) -> None:
        """Raise an error if an op would write to a real tensor or compute gradients for it.

        A prediction must not change a tensor that was made outside the traced function.
        """
        if op is aten.detach.default:
            return
        written = [argument.is_write for argument in op._schema.arguments[: len(args)]]
        for is_written, value in zip(written, args, strict=True):
            for tensor in tensors_in((value,)):
                if not isinstance(tensor, FakeTensor) and (
                    is_written or (tensor.requires_grad and torch.is_grad_enabled())
                ):
                    raise InputError(
                        f"a tensor of shape {list(tensor.shape)} that was made before the training is trained in it"
                        f"{self._where() or ''}, and a prediction must not change it: make the model inside the "
                        "function, or use plimsoll.predict(model, optimizer, batch)"
                    )

    def _forget_written(self, op: Any, args: tuple[Any, ...]) -> None:
        if not op._schema.is_mutable:
            return
        for argument, value in zip(op._schema.arguments, args, strict=False):
            if argument.is_write:
                for tensor in tensors_in((value,)):
                    known = getattr(tensor, _ATTRIBUTE, None)
                    if known is not None:
                        storage = known.untyped_storage()
                        self._wrong[storage._cdata] = weakref.ref(storage)


def _zero(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype is torch.bool:
        return False
    return 0j if dtype.is_complex else 0.0 if dtype.is_floating_point else 0


def _below_modes(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a context in which ops bypass all dispatch modes; for tensor subclasses, the context is slower."""
    if all(type(one) is Tensor for one in tensors):
        guard: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
        return guard
    return _disable_current_modes()


def _is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is small enough to keep its values: integers and booleans, or a few floats."""
    return tensor.numel() <= (_MOST_FLOATING if tensor.dtype.is_floating_point else MOST_ELEMENTS)
