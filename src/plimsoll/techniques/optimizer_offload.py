"""Offloading of optimizer states: to a memory-mapped file (CPU), or to host memory with copies for updates (CUDA).

States are moved right after the update that created them, so only the new states of one chunk
(`plimsoll.step.update.commit`) are on the device. In a memory-mapped file, an update is in place. In host memory, the
states of a chunk are lent (`plimsoll.device.off_device.Lender`). They are copied to the device, updated there, and
copied back when the step keeps the chunk. Until then the states on the host are unchanged, so an undo needs no other
copy of the states.

Numerics: bitwise, the same kernels on the same values. Does NOT cover sparse states, and states outside
``optimizer.state``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.device.off_device import is_marked, states_outside
from plimsoll.models.workload import Workload, resident_bytes
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.pinned import PinnedPool
from plimsoll.techniques.mechanisms.side_stream import SideStream, Transfer
from plimsoll.techniques.mechanisms.technique import Choices, Exported, Setting, Technique, by_deepspeed

PLACES = {"cpu": "disk", "cuda": "host"}
"""The place of the offloaded states for each device: memory that the budget of the device does not count."""

DEEPSPEED_PLACES = {"host": "cpu", "disk": "nvme"}
"""DeepSpeed's name for each place of the states."""


class Pool(Protocol):
    """The interface of an allocator of tensors outside the memory of the device."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Create an uninitialized tensor with the shape, strides and dtype of another."""
        ...

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Create a copy of a tensor in the memory of this pool."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Return whether this pool has allocated the memory of a tensor."""
        ...


def _zero(choice: Choice, device: Literal["cpu", "cuda"]) -> Exported:
    place = DEEPSPEED_PLACES[str(choice.options.get("to", PLACES[device]))]
    stage = 3 if place == "nvme" else 2  # only stage 3 supports disks
    return Exported({"zero_optimization": {"stage": stage, "offload_optimizer": {"device": place}}})


class OptimizerOffload(Technique):
    """`Technique`: offload optimizer states."""

    name = "optimizer_offload"
    numerics = "bitwise"
    summary = "optimizer states are kept in a memory-mapped file (CPU) or in host memory (CUDA)"
    modifies = frozenset({"optimizer"})
    moves = frozenset({"states"})
    reaches = frozenset({"optimizer states"})
    works_on_shards = True
    keeps_state_between_passes = False
    exports: ClassVar = {"deepspeed": _zero, "accelerate": by_deepspeed}
    by_hand = "keep optimizer states in host memory, as DeepSpeed's offload_optimizer does"
    remedies: ClassVar = {"optimizer_states": 0, "optimizer_temporaries": 2}
    stage = "places"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice: offload all states, to a file on the CPU and to host memory on CUDA."""
        if resident_bytes(workload.model, workload.optimizer)["optimizer_states"] == 0:
            return f"{type(workload.optimizer).__name__} keeps no states with its current settings"
        return (Choice(technique=self.name, options={"to": PLACES[setting.device]}),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the device cannot offload to the chosen target."""
        place = PLACES[setting.device]
        if choice.options.get("to") != place:
            return (
                f"on {setting.device} states go to `{place}` and not to `{choice.options.get('to')}`: give to={place}"
            )
        return None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Offload existing and future states; on exit, move them back."""
        optimizer = workload.optimizer
        is_streamed = choice.options["to"] == "host"
        pool: Pool = PinnedPool() if is_streamed else _file_for(workload)
        states = _States(optimizer, pool, is_streamed)
        handles = [
            optimizer.register_load_state_dict_pre_hook(states.before_loading),
            optimizer.register_load_state_dict_post_hook(states.after_loading),
        ]
        unwrap = _wrap_step(optimizer, states.update)
        try:
            with states_outside(optimizer, pool.copy_of, states if is_streamed else None):
                states.send(_parameters_of(optimizer))
                yield
        finally:
            for handle in handles:
                handle.remove()
            if not is_streamed:
                unwrap()
            states.leave()
            if is_streamed:  # unwrapped last, because states that did not fit still need the wrapper
                unwrap()


def _file_for(workload: Workload) -> MappedPool:
    """Return a pool with a file as large as all states, so that a full disk raises before the training starts."""
    pool = MappedPool()
    parameters = _parameters_of(workload.optimizer)
    num_bytes = resident_bytes(workload.model, workload.optimizer)["optimizer_states"]
    if num_bytes and not any(isinstance(parameter, FakeTensor) for parameter in parameters):
        pool.reserve(num_bytes + 256 * len(parameters))  # each tensor begins at a multiple of 64 bytes
    return pool


class _Lent(NamedTuple):
    """A lent tensor: its state dictionary and key, the tensor on the host, and its copy on the device."""

    state: dict[str, Any]
    key: str
    kept: Tensor
    copy: Tensor


class _States:
    """The offloaded states of an optimizer. States in host memory are lent to updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, pool: Pool, is_streamed: bool) -> None:
        self._optimizer, self._pool, self._is_streamed = optimizer, pool, is_streamed
        self._set_aside: dict[Any, dict[str, Any]] = {}
        self._is_leaving = self._holds_back = False
        self._lent: list[_Lent] = []
        self._updated: list[nn.Parameter] = []
        self._sides: dict[torch.device, SideStream] = {}
        self._departures: list[Transfer] = []

    def update(self, step: Callable[[], Any]) -> Any:
        """Run an update of the optimizer's current parameters; if it fails, restore the states."""
        parameters = _parameters_of(self._optimizer)
        is_done = False
        try:
            if self._is_streamed:
                self._lend(parameters)
            result = step()
            is_done = True
        finally:
            if not is_done:
                self.drop()
        self._updated += parameters
        if not self._holds_back:
            self.keep()
        return result

    def send(self, parameters: list[nn.Parameter]) -> None:
        """Offload the states that are still on the device."""
        for _, state, key, value in self._of(parameters):
            if not self._pool.holds(value):
                state[key] = self._pool.copy_of(value)

    # -- lending: see `plimsoll.device.off_device.Lender`
    # ------------------------------------------------------------------------

    def is_lent(self, parameter: Tensor, state: Tensor) -> bool:
        """Return whether a state tensor is on the host, so that an update works on a copy of it."""
        return not is_marked(parameter) and _moves(state) and self._pool.holds(state)

    def copies_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start to copy tensors to the host, and return the copies. The next update waits for the copying."""
        copies = [self._pool.empty_like(tensor) for tensor in tensors]
        pairs = [(copy, tensor.detach()) for copy, tensor in zip(copies, tensors, strict=True)]
        self._departures += [side.send(some) for side, some in self._by_device(pairs, of_target=False)]
        return copies

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Leave the states on the host unchanged by the updates in the ``with`` block.

        Afterwards, `keep` copies the new values to the host, or `drop` discards them.
        """
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    def keep(self) -> None:
        """Copy the lent states back to the host, and offload the new states of updated parameters."""
        lent, self._lent = self._lent, []
        updated, self._updated = self._updated, []
        if self._is_leaving:  # states stay on the device from now on
            return
        pairs = [(one.kept, one.state[one.key]) for one in lent]
        for side, some in self._by_device(pairs, of_target=False):
            side.send(some).synchronize()  # the host reads them for checkpoints and undo copies
        for one in lent:
            one.state[one.key] = one.kept
        self.send(updated)

    def drop(self) -> None:
        """Discard the lent copies, so that the unchanged states on the host are used again."""
        for one in self._lent:
            one.state[one.key] = one.kept
        self._lent, self._updated, self._departures = [], [], []

    def _lend(self, parameters: list[nn.Parameter]) -> None:
        """Replace the states of these parameters with copies on the device; if memory runs out, replace none."""
        lent = [
            _Lent(state, key, value, _room_for(value, parameter))
            for parameter, state, key, value in self._of(parameters)
            if self._pool.holds(value)
        ]
        pairs = [(one.copy, one.kept) for one in lent]
        arrivals = [side.bring(some) for side, some in self._by_device(pairs, of_target=True)]
        for transfer in self._departures + arrivals:
            transfer.wait()
        self._departures = []
        for one in lent:
            one.state[one.key] = one.copy
        self._lent += lent

    def _by_device(
        self, pairs: Sequence[tuple[Tensor, Tensor]], of_target: bool
    ) -> Iterator[tuple[SideStream, list[tuple[Tensor, Tensor]]]]:
        """Yield the side stream of each device, with the pairs of target and source that it copies.

        ``of_target``: whether pairs are grouped by the device of the target, rather than of the source.
        """
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for pair in pairs:
            by_device.setdefault(pair[not of_target].device, []).append(pair)
        for device, some in by_device.items():
            if device not in self._sides:
                self._sides[device] = SideStream(device)
            yield self._sides[device], some

    def leave(self) -> None:
        """Move every state to the device of its parameter, one by one, and stop offloading.

        If memory runs out, the remaining states can be used where they are. The next update of a parameter moves its
        states from host memory back.
        """
        self._is_leaving = True
        for parameter, state, key, value in self._of(self._optimizer.state):
            if self._pool.holds(value):
                state[key] = _on_device(value, parameter)

    def before_loading(self, optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        """Set aside the large tensors, which torch would put on the device all at once, and copy all other tensors.

        A step count is copied, because torch would use it as it is, and it may be in the memory-mapped checkpoint.
        """
        self._set_aside = loaded["state"]
        small = {
            number: {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in state.items()
                if not _moves(value)
            }
            for number, state in loaded["state"].items()
        }
        return loaded | {"state": small}

    def after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        """Offload the loaded tensors that were set aside, one at a time."""
        full, self._set_aside = self._set_aside, {}
        numbers = chain.from_iterable(group["params"] for group in optimizer.state_dict()["param_groups"])
        for number, parameter in zip(numbers, _parameters_of(optimizer), strict=True):
            small = optimizer.state.pop(parameter, {})
            if number in full:
                optimizer.state[parameter] = {
                    key: self._pool.copy_of(value.to(parameter.dtype)) if _moves(value) else small[key]
                    for key, value in full[number].items()
                }

    def _of(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, dict[str, Any], str, Tensor]]:
        """Return the offloadable state tensors of parameters, each with its parameter, state dictionary and key."""
        states = self._optimizer.state
        return [
            (parameter, states[parameter], key, value)
            for parameter in parameters
            if parameter in states and not is_marked(parameter)  # an offloaded parameter has its states at its place
            for key, value in states[parameter].items()
            if _moves(value)
        ]


def _moves(value: Any) -> bool:
    """Return whether a state is worth offloading: several floating-point numbers, or byte codes of numbers."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return is_dense and (value.is_floating_point() or value.dtype == torch.uint8) and value.numel() > 1


def _on_device(tensor: Tensor, parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return _room_for(tensor, parameter).copy_(tensor)


def _room_for(tensor: Tensor, parameter: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=parameter.device)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _wrap_step(optimizer: torch.optim.Optimizer, run: Callable[[Callable[[], Any]], Any]) -> Callable[[], None]:
    """Make each ``optimizer.step()`` call ``run`` with the original step. Return a function that undoes this."""
    own = vars(optimizer).get("step")  # the wrapper of a learning rate schedule, which counts steps
    step = optimizer.step

    @functools.wraps(step)
    def wrapped(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return run(lambda: step(*args, **kwargs))

    def unwrap() -> None:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]

    optimizer.step = MethodType(wrapped, optimizer)  # type: ignore[method-assign]  # schedules require a method
    return unwrap
