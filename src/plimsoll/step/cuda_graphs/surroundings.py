"""The conditions that affect the results of a captured pass, other than the contents of Python containers.

    around = Around(before, device)     # before the passes of the capture
    around.what_a_pass_changed()        # changes that no operator made
    around.what_changed(before)         # before another step

It compares the bytes of numpy arrays and host tensors, environment variables, the addresses of tensors and their
``requires_grad``. It also compares hooks, torch's settings, code, and objects added to containers since the search for
state.

Not compared: files, clocks, and objects of libraries that `plimsoll.step.undo.find_state` does not follow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.records.units import format_bytes
from plimsoll.step.undo.contents import Places
from plimsoll.step.undo.find_state import SMALL_BYTES, Reached, is_of_library, name_of_item, reached_from
from plimsoll.step.undo.hooks import SavedHooks, containers_of
from plimsoll.step.undo.saved import SavedArray, SavedTensor
from plimsoll.step.undo.snapshot import are_equal
from plimsoll.step.undo.state_before_step import Before
from plimsoll.step.undo.written import has_storage

_MOST_ITEMS = 10_000  # largest container that is searched for new objects
_OF_THE_UPDATE = "optimizer"  # prefix of the names of its places and tensors
_ALWAYS_IN_USE = (torch, nn.functional)

_Arrays = list[tuple[str, SavedArray]]
_Tensors = list[tuple[str, Tensor, int | None, SavedTensor]]  # with their versions


class Around:
    """The conditions under which a step's passes run (see the module), recorded at construction to be compared later.

    Args:
        before: the objects that the training reaches, and their state before the step.
        device: the device on which the model is trained.

    Attributes:
        obstacle: the reason why the conditions cannot be compared; ``None`` if they can.
    """

    def __init__(self, before: Before, device: torch.device) -> None:
        come = _come_since(before)
        self._names = [name for name, _ in come.places]
        self._places = Places([place for _, place in come.places])
        self._contents = self._places.contents()
        self._stored = [pair for pair in come.tensors.values() if has_storage(pair[1])]
        self._of_hooks = containers_of(come.modules), [tensor for _, tensor in self._stored]
        self.obstacle: str | None = None
        self._arrays, self._tensors = self._data_of([before.reached, come], device)
        self._code = _Code([*before.reached.seen.values(), *come.seen.values()])
        self._environment = dict(os.environ)
        self._where, self._others = self._where_now(before), self._others_now(before)

    def what_a_pass_changed(self) -> str | None:
        """Return the name of an array or host tensor that a pass changed other than by a torch operator.

        Writes by operators, such as updates of buffers, are excluded. Returns ``None`` if no data was changed.
        """
        self._tensors = [one for one in self._tensors if _version_of(one[1]) == one[2]]
        return self._changed_data()

    def what_changed(self, before: Before) -> str | None:
        """Return the name of an object or setting that has changed since construction; ``None`` if all are equal."""
        now = self._places.contents()
        for number in self._contents.differing(now):
            if not are_equal(*map(flat, (self._contents[number], now[number]))):
                return self._names[number]
        if self._others_now(before) != self._others:
            return "a hook or a setting of torch"
        where = self._where_now(before)
        moved = next((name for name, place in self._where.items() if where.get(name) != place), None)
        return (
            f"the address or requires_grad of {moved}"
            if moved is not None
            else self._changed_data() or self._code.what_changed()
        )

    def _changed_data(self) -> str | None:
        for name, array in self._arrays:
            if array.is_changed():
                return name
        for name, _, _, tensor in self._tensors:
            if tensor.is_changed():
                return name
        return "the environment" if os.environ != self._environment else None

    def _data_of(self, all_reached: Sequence[Reached], device: torch.device) -> tuple[_Arrays, _Tensors]:
        """Return copies of arrays and host tensors, which code can read without torch, for example by ``.tolist()``."""
        arrays = [pair for one in all_reached for pair in one.arrays if not is_of_the_update(pair[0])]
        is_on_cpu = device.type == "cpu"  # in tests, the CPU stands in for the device: weights and buffers are on it
        own = {id(one) for reached in all_reached for module in reached.modules for one in module._buffers.values()}
        tensors = [
            (name, tensor) for reached in all_reached for name, tensor in reached.tensors.values()
            if tensor.device.type == "cpu" and has_storage(tensor) and not is_of_the_update(name)
            and not (is_on_cpu and (isinstance(tensor, nn.Parameter) or id(tensor) in own))
        ]  # fmt: skip
        sizes = [(array.nbytes, name) for name, array in arrays]
        sizes += [(tensor.untyped_storage().nbytes(), name) for name, tensor in tensors]
        if (num_bytes := sum(size for size, _ in sizes)) > SMALL_BYTES:
            self.obstacle = (
                f"Python may read {format_bytes(num_bytes)} of arrays and host tensors (most in {max(sizes)[1]}), "
                f"but no more than {format_bytes(SMALL_BYTES)} can be compared before each step"
            )
            return [], []
        of_objects = next((name for name, array in arrays if array.dtype.hasobject), None)
        if of_objects is not None:
            self.obstacle = f"{of_objects} is an array of objects, which cannot be compared"
        return (
            [(name, SavedArray(array, array.copy())) for name, array in arrays],
            [(name, tensor, _version_of(tensor), SavedTensor.of(tensor)) for name, tensor in tensors],
        )

    def _where_now(self, before: Before) -> dict[str, tuple[int, bool]]:
        stored = [*zip(before.watched.stored, before.addresses, strict=True)]
        stored += [((f"{name} (new)", tensor), tensor.data_ptr()) for name, tensor in self._stored]
        return {
            name: (address, tensor.requires_grad) for (name, tensor), address in stored if not is_of_the_update(name)
        }

    def _others_now(self, before: Before) -> tuple[Any, ...]:
        hooks = before.hooks and before.hooks.of_others()
        return hooks, SavedHooks(*self._of_hooks).of_others(), _settings()


class _Code:
    """The code in use: methods of classes, functions in modules, and the code and defaults of functions."""

    def __init__(self, seen: Sequence[Any]) -> None:
        kinds = {kind for one in seen if isinstance(one, type) for kind in one.__mro__ if kind is not object}
        modules = (sys.modules.get(kind.__module__) for kind in kinds if issubclass(kind, nn.Module))
        used = {module.__name__: module for module in modules if module is not None and is_of_library(module.__name__)}
        spaces: list[type | ModuleType] = [*kinds, torch.Tensor, *_ALWAYS_IN_USE, *used.values()]
        self._spaces = [(space, dict(vars(space))) for space in spaces]
        functions = [one for one in seen if isinstance(one, FunctionType)]
        self._functions = [(function, _parts_of(function)) for function in functions]

    def what_changed(self) -> str | None:
        """Return the name of code that was replaced since construction; ``None`` if no code was."""
        for number, (space, names) in enumerate(self._spaces):
            now = vars(space)
            if len(now) == len(names) and all(map(is_, now.values(), names.values())):
                continue
            if not _has_same(_code_in(now), _code_in(names)):
                name = f"{space.__module__}.{space.__qualname__}" if isinstance(space, type) else space.__name__
                return f"the code in {name}"
            self._spaces[number] = space, dict(now)  # makes the next comparison fast
        changed = (one for one, parts in self._functions if not all(map(is_, _parts_of(one), parts)))
        return next((f"the function {function.__qualname__}" for function in changed), None)


def flat(content: Any) -> list[Any]:
    """Return the content of a container as one list: the items, or the keys followed by the values."""
    return [*content, *content.values()] if isinstance(content, dict) else content


def is_of_the_update(name: str) -> bool:
    """Return whether this is the name of a container, tensor or array of the optimizer."""
    return name.startswith(_OF_THE_UPDATE)


def _come_since(before: Before) -> Reached:
    """Return the objects added to containers since the search for state, and everything that they reach."""

    def values() -> Iterator[tuple[str, Any]]:
        for number, (name, _) in enumerate(before.reached.places):
            content = () if is_of_the_update(name) else before.contents[number]
            if len(content) <= _MOST_ITEMS:
                pairs = content.items() if isinstance(content, dict) else enumerate(content)
                yield from ((name_of_item(name, key), value) for key, value in pairs)

    return reached_from(values(), before.reached)


def _version_of(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _code_in(names: Any) -> dict[str, Any]:
    return {name: value for name, value in names.items() if callable(value) or hasattr(type(value), "__get__")}


def _has_same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(value is others[name] for name, value in some.items())


def _parts_of(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _settings() -> tuple[Any, ...]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        cuda.matmul.allow_tf32,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
    )
