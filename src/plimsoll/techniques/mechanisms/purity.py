"""What is computed twice must not change what it is given: how that is noticed, and the line that does it.

A segment of time is computed forward and again in backward, from the same state. Code that changes that state in place
(``state.add_(...)``), or keeps a state of its own in an attribute (``self.hidden = ...``), would begin the second time
from another one, and its gradients would be wrong without a word.

Changes in place are seen by version counters, attributes by their identity, numbers, strings and arrays of numpy by
their value (of an array of more than 1,024 numbers, of so many of them), and all cost microseconds; only once something
is found is the segment run again, on copies, to find the line. Does NOT see changes through ``.data``, which no counter
counts, and what is kept outside of a module (a global, a closure's list, a generator of random numbers) or deeper in
its attributes than in an object's own.
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
_NO_STATE = {"builtins", "functools"}  # functions and the like
_MOST_READ = 1024  # numbers of an array, at equal distances
_INNER_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def run_purely(run: Callable[..., Passed], number: int, state: Sequence[Tensor], slices: Sequence[Tensor]) -> Passed:
    """Return ``run(number, state, slices)``.

    Raises:
        InputError: if it has changed one of the tensors in place; it names the line.
    """
    given = [*state, *slices]
    versions = [_version(tensor) for tensor in given]
    result = run(number, tuple(state), tuple(slices))
    if any(_version(tensor) != version for tensor, version in zip(given, versions, strict=True)):
        where = _line_of_change(run, number, state, slices)
        raise InputError(
            f"segment {number} of a sequence changes the state or the input it was given in place{where}: it is "
            "computed again in backward, from a state that is no longer there; write `state = state + ...` in place "
            "of `state += ...`"
        )
    return result


class Attributes:
    """What the modules of a cell or a model keep as plain attributes, before a segment and after it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = dict(_kept(module))

    def require_unchanged(self) -> None:
        """Refuse what keeps something of a sequence in an attribute.

        Raises:
            InputError: if there are other tensors, numbers, strings or arrays than before; it names the attribute and
                the line.
        """
        for (name, attribute), found in _kept(self._module):
            if self._before.get((name, attribute)) != found:
                owner = self._module.get_submodule(name)
                where = _line_of_assignment(owner, attribute)
                if attribute in owner._buffers:
                    raise InputError(
                        f"{type(owner).__name__} changes its buffer `{attribute}` as it computes{where}, and would do "
                        "so twice for each segment: put that module in evaluation mode, or leave segments out"
                    )
                raise InputError(
                    f"{type(owner).__name__} keeps a state in its attribute `{attribute}`{where}, which is another one "
                    "when a segment is computed again in backward: return it as the state: `return output, state`"
                )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # which an inference tensor does not have


def _kept(module: nn.Module) -> Iterator[tuple[tuple[str, str], tuple[Any, ...]]]:
    """What each plain attribute and buffer of a module and its parts holds of tensors and numbers."""
    for name, part in module.named_modules():
        computed = {getattr(hook, "name", None) for hook in part._forward_pre_hooks.values()}  # weight_norm's weight
        for attribute, value in [*vars(part).items(), *part._buffers.items()]:
            if attribute in _OF_MODULES or attribute in computed:
                continue
            found = tuple(_values_in(value, looks_inside=True))
            if found:
                yield (name, attribute), found


def _values_in(value: Any, looks_inside: bool) -> Iterator[Any]:
    """The identities and versions of tensors, and numbers, in a value and what it holds."""
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
    """What tells the content of an array: numpy counts no changes, so it is read; of a large one, a part is."""
    if array.dtype.hasobject:
        return id(array), array.shape
    step = -(-array.size // _MOST_READ) or 1
    return id(array) if array.size > _MOST_READ else None, array.shape, array.reshape(-1)[::step].tobytes()


def _line_of_assignment(module: nn.Module, attribute: str) -> str:
    """Where the methods of a module's class set an attribute, but for its ``__init__``; empty if that is not found."""
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
    """Run a segment on copies and find the first line that writes to them."""
    copies = [tensor.detach().clone() for tensor in (*state, *slices)]
    watch = _Watch({tensor.untyped_storage()._cdata for tensor in copies})
    with torch.no_grad(), watch:
        run(number, tuple(copies[: len(state)]), tuple(copies[len(state) :]))
    return watch.line


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the line of the first op that writes to one of some storages."""

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
