"""Checks that code which runs twice does not change its inputs, and a search for the line that changes them.

A segment of time runs forward, and again in backward from the same state. The code may change that state in place
(``state.add_(...)``) or keep state in an attribute (``self.hidden = ...``). Then the second run would start from
another state, and gradients would be silently wrong.

In-place changes are detected by version counters, and new tensors in attributes by identity. Numbers, strings and numpy
arrays are compared by value; of a large array, up to 1,024 elements are sampled. All checks cost microseconds. The
segment is run again, on copies, only if a violation was found, in order to find the line.

Not detected: changes through ``.data``, which no counter counts; state outside of a module (a global, a closure's list,
a random number generator); and state in objects nested inside the object that an attribute holds.
"""

from __future__ import annotations

import dis
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.errors import InputError
from plimsoll.models.recurrent.segments import Passed

_OF_MODULES = {"forward", *vars(nn.Module())}
_NO_STATE = {"builtins", "functools"}  # modules of functions and similar objects
_MOST_READ = 1024  # elements of an array, evenly spaced
_INNER_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def run_purely(run: Callable[..., Passed], number: int, state: Sequence[Tensor], slices: Sequence[Tensor]) -> Passed:
    """Run a segment: return ``run(number, state, slices)``.

    Raises:
        InputError: if ``run`` changes one of the tensors in place; the message names the line.
    """
    given = [*state, *slices]
    versions = [_version(tensor) for tensor in given]
    result = run(number, tuple(state), tuple(slices))
    if any(_version(tensor) != version for tensor, version in zip(given, versions, strict=True)):
        where = _line_of_change(run, number, state, slices)
        raise InputError(
            f"segment {number} of a sequence changes its state or input in place{where}, but backward computes it "
            "again and needs the original values: write `state = state + ...` in place of `state += ...`"
        )
    return result


class Attributes:
    """A snapshot, made before a segment, of the plain attributes and buffers of a module and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = dict(_kept(module))

    def require_unchanged(self) -> None:
        """Raise an error if a module keeps state of a sequence in an attribute or buffer.

        Raises:
            InputError: if tensors, numbers, strings or arrays have changed; the message names the attribute and the
                line.
        """
        for (name, attribute), found in _kept(self._module):
            if self._before.get((name, attribute)) != found:
                owner = self._module.get_submodule(name)
                where = _line_of_assignment(owner, attribute)
                if attribute in owner._buffers:
                    raise InputError(
                        f"{type(owner).__name__} changes its buffer `{attribute}` in forward{where}, and checkpointing "
                        "runs each forward twice: put that module in evaluation mode, or leave segments out"
                    )
                raise InputError(
                    f"{type(owner).__name__} keeps a state in its attribute `{attribute}`{where}, whose value differs "
                    "when backward computes a segment again: return it as the state: `return output, state`"
                )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # an inference tensor has no version counter


def _kept(module: nn.Module) -> Iterator[tuple[tuple[str, str], tuple[Any, ...]]]:
    """Yield each plain attribute and buffer of a module and its submodules, with a fingerprint of its values.

    An attribute is identified by the name of the submodule and its own name.
    """
    for name, part in module.named_modules():
        computed = {getattr(hook, "name", None) for hook in part._forward_pre_hooks.values()}  # weight_norm's weight
        for attribute, value in [*vars(part).items(), *part._buffers.items()]:
            if attribute in _OF_MODULES or attribute in computed:
                continue
            found = tuple(_values_in(value, looks_inside=True))
            if found:
                yield (name, attribute), found


def _values_in(value: Any, looks_inside: bool) -> Iterator[Any]:
    """Yield the identity and version of each tensor in a value and its items, and the plain values themselves.

    ``looks_inside``: whether to search the attributes of other objects too, one level deep.
    """
    if isinstance(value, Tensor):
        yield id(value), _version(value)
    elif isinstance(value, int | float | complex | str | bytes | bytearray):
        yield bytes(value) if isinstance(value, bytearray) else value
    elif isinstance(value, np.ndarray | np.generic):
        yield _of_array(np.asarray(value))
    elif value is None:
        yield None
    elif isinstance(value, list | tuple | deque | set):
        for item in value:
            yield from _values_in(item, looks_inside)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str | int | float):
                yield key
            yield from _values_in(item, looks_inside)
    elif looks_inside and type(value).__module__ not in _NO_STATE and not isinstance(value, nn.Module | type):
        for item in getattr(value, "__dict__", {}).values():
            yield from _values_in(item, looks_inside=False)


def _of_array(array: NDArray[Any]) -> tuple[Any, ...]:
    """Return a fingerprint of an array's content, because numpy has no version counters; a large array is sampled."""
    if array.dtype.hasobject:
        return id(array), array.shape
    step = -(-array.size // _MOST_READ) or 1
    return id(array) if array.size > _MOST_READ else None, array.shape, array.reshape(-1)[::step].tobytes()


def _line_of_assignment(module: nn.Module, attribute: str) -> str:
    """Return the file and line outside ``__init__`` where a module's class sets an attribute; empty if not found."""
    for kind in type(module).__mro__:
        for name, method in vars(kind).items():
            code = getattr(method, "__code__", None)
            if code is None or name == "__init__":
                continue
            for instruction in dis.get_instructions(code):
                if instruction.opname == "STORE_ATTR" and instruction.argval == attribute and instruction.positions:
                    return f" ({Path(code.co_filename).name}, line {instruction.positions.lineno})"
    return ""


def _line_of_change(run: Callable[..., Any], number: int, state: Sequence[Tensor], slices: Sequence[Tensor]) -> str:
    """Run a segment on copies of its inputs, and return the first line that writes to one of them."""
    copies = [tensor.detach().clone() for tensor in (*state, *slices)]
    watch = _Watch({tensor.untyped_storage()._cdata for tensor in copies})
    with torch.no_grad(), watch:
        run(number, tuple(copies[: len(state)]), tuple(copies[len(state) :]))
    return watch.line


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the line of the first op that writes to one of the given storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages, self.line = storages, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.line and self._writes(func, args):
            frames = [one for one in traceback.extract_stack() if not one.filename.startswith(_INNER_FOLDERS)]
            if frames:
                self.line = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})"
        return func(*args, **(kwargs or {}))

    def _writes(self, func: Any, args: Any) -> bool:
        for declared, given in zip(func._schema.arguments, args, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write and isinstance(given, Tensor):
                return given.untyped_storage()._cdata in self._storages
        return False
