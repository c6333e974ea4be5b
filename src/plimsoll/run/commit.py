"""`optimizer.step()` as a transaction: afterwards the whole step has happened, or none of it.

An optimizer changes parameters and states in place, so memory running out half way (Adam's temporaries, or its states
in the first step) leaves some parameters updated and some not. Here the step is done in *pieces*, each a few parameters
whose values and states are copied just before, so a piece can always be undone. The copy is small, dropped with the
piece, and most of what `benchmarks/overhead.py` measures.

That a failure can always be mended follows from the order. The largest parameter goes first, so the first piece needs
most; the states that the first step will still create are proven to fit by allocating as much once; and every finished
piece gives its gradients back. So memory runs out in the first piece, which is undone and nothing has happened, or not
at all. A later failure is something else taking memory: the piece is undone and done again, in halves where it can be
cut. If what cannot be cut fails twice, what was done cannot be taken back: `TornStepError` says so, and a checkpoint is
the way back.

Where not even the copy of a piece fits, or it takes the memory that the update needs, the piece is done without one,
but only after what its update can take at most has been shown to be there.

Covers optimizers of ``torch.optim`` piece by piece; an optimizer from elsewhere, or one with step hooks, may look at
all parameters together and is therefore one single piece. Does NOT cover state kept outside ``optimizer.state``,
and errors other than memory running out (a Ctrl-C in a loop of one's own) in the middle of an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
import torch.optim.optimizer as hooks  # the hooks that see every optimizer are registered here and nowhere public
from torch import nn

from plimsoll.device.base import Backend
from plimsoll.errors import TornStepError
from plimsoll.records.run import OomEvent
from plimsoll.records.units import format_bytes
from plimsoll.run.boundary import Position, attempt
from plimsoll.run.failpoints import failpoint

# A piece on the CPU stays in the cache between its copy and its update; on a GPU small pieces would cost launches.
_PIECE_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
# On the CPU copies are made in memory that is kept: to take and free it in every step makes the C library give the top
# of its heap back to the system and take it again, which costs up to twice as much as the copying. CUDA's allocator
# keeps it.
_KEPT_BYTES = {"cpu": 8 << 20, "cuda": 0}
_TEMPORARIES = 3  # times the parameters' bytes; `torch.optim` needs at most two
_MOST_STATES = 2  # times the parameters' bytes: Adam and its kin; only AMSGrad keeps three


@dataclass(slots=True)
class _Piece:
    """Some parameters of each parameter group: ``groups`` maps the group's index to them."""

    is_separable: bool
    groups: dict[int, list[nn.Parameter]] = field(default_factory=dict)
    num_bytes: int = 0
    num_failures: int = 0

    @property
    def device(self) -> torch.device:
        return self.parameters()[0].device

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameters in self.groups.values() for parameter in parameters]

    def add(self, group: int, parameter: nn.Parameter) -> None:
        self.groups.setdefault(group, []).append(parameter)
        self.num_bytes += parameter.nbytes

    def release_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def can_be_cut(self) -> bool:
        return self.is_separable and len(self.parameters()) > 1

    def may_be_tried_again(self) -> bool:
        """Whether it can be cut further, or has failed only once."""
        self.num_failures += 1
        return self.can_be_cut() or self.num_failures == 1

    def halves(self) -> list[_Piece]:
        """The piece as two, or itself if it cannot be cut."""
        if not self.can_be_cut():
            return [self]
        members = [(group, parameter) for group, parameters in self.groups.items() for parameter in parameters]
        parts = [_Piece(is_separable=True), _Piece(is_separable=True)]
        for number, (group, parameter) in enumerate(members):
            parts[number * 2 // len(members)].add(group, parameter)
        return parts


class _Scratch:
    """Memory for copies, kept from step to step up to ``kept_bytes`` for each dtype and device."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._kept: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    @torch.no_grad()
    def copies_of(self, tensors: list[torch.Tensor]) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
        """Copy the tensors that are alike into one: a copy for each would take more time than the copying itself."""
        alike: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        for tensor in tensors:  # the number of a device takes a fifth of the time of the device itself
            alike.setdefault((tensor.dtype, tensor.get_device()), []).append(tensor)
        return [(group, self._copy(key, group)) for key, group in alike.items()]

    def _copy(self, key: tuple[torch.dtype, int], tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = [tensor.reshape(-1) for tensor in tensors]
        num_elements = sum(map(len, flat))
        memory = self._kept.get(key)
        if memory is None or len(memory) < num_elements:
            memory = torch.empty(num_elements, dtype=flat[0].dtype, device=flat[0].device)
            if memory.nbytes <= self._kept_bytes:
                self._kept[key] = memory
        return torch.cat(flat, out=memory[:num_elements])


class _Copy:
    """The parameters of a piece and their optimizer states, as they are now."""

    def __init__(self, optimizer: torch.optim.Optimizer, piece: _Piece, scratch: _Scratch) -> None:
        self._optimizer = optimizer
        self._states: list[tuple[nn.Parameter, dict[str, Any]]] = []
        self._fresh: list[nn.Parameter] = []
        tensors: list[torch.Tensor] = [*piece.parameters()]
        for parameter in piece.parameters():
            state = optimizer.state.get(parameter)
            if state is None:
                self._fresh.append(parameter)
            else:
                self._states.append((parameter, dict(state)))
                tensors.extend(value for value in state.values() if isinstance(value, torch.Tensor))
        self._copies = scratch.copies_of(tensors)
        # Some optimizers count in their groups; which parameters are in them is put back by `_only`.
        self._settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        for tensors, flat in self._copies:
            values = torch.split(flat, [tensor.numel() for tensor in tensors])
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value.view(tensor.shape))
        for parameter, state in self._states:
            self._optimizer.state[parameter].clear()
            self._optimizer.state[parameter].update(state)
        for parameter in self._fresh:
            self._optimizer.state.pop(parameter, None)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)


class StepCommit:
    """Runs the step of one optimizer as a transaction.

    It has ``param_groups`` and ``step`` like the optimizer, so that a ``GradScaler`` can unscale and step it.

    Args:
        optimizer: the optimizer; its gradients are released as they are used.
        backend: the device's backend.
        position: where the run is, for the record of an error.
        piece_bytes: parameters per piece, in bytes; ``None`` for what suits the device.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, backend: Backend, position: Position, piece_bytes: int | None = None
    ) -> None:
        self.optimizer = optimizer
        self.outcome: OomEvent | None = None
        self.was_called = False
        self.recovered: list[OomEvent] = []
        self._backend = backend
        self._position = position
        self._scratch = _Scratch(_KEPT_BYTES[backend.kind])
        self._piece_bytes = piece_bytes or _PIECE_BYTES[backend.kind]

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Do the whole step, or nothing; ``outcome`` is then ``None``, or the event that prevented it.

        Events that did not prevent it are added to ``recovered``.

        Raises:
            TornStepError: if memory ran out where neither is possible any more.
        """
        self.was_called = True
        self.outcome = None
        waiting = list(reversed(_pieces(self.optimizer, self._piece_bytes)))
        nothing_happened = True
        while waiting:
            piece = waiting.pop()
            event = self._do(piece, self._stateless_bytes(waiting) if nothing_happened else 0)
            if event is None:
                nothing_happened = False
                continue
            self._backend.release()
            if piece.may_be_tried_again():
                self.recovered.append(event.model_copy(update={"action": "part of the update undone, done again"}))
                waiting.extend(reversed(piece.halves()))
            elif nothing_happened:
                self.outcome = event
                return
            else:
                raise _torn(event)

    def _do(self, piece: _Piece, other_bytes: int) -> OomEvent | None:
        """Update one piece and release its gradients, or leave it as it was.

        ``other_bytes``: the bytes of the parameters whose new states must be proven to fit as well.
        """
        copy = self._copy_of(piece)
        if copy is None:
            return self._do_without_copy(piece, other_bytes)
        event = attempt(lambda: self._step_on(piece), self._backend, self._position)
        if event is None and other_bytes:
            need_bytes = other_bytes * self._state_bytes(piece) // max(piece.num_bytes, 1)
            event = attempt(lambda: _prove_room(need_bytes, piece.device), self._backend, self._position)
        if event is not None:
            copy.restore()
            return event
        piece.release_gradients()
        return None

    def _copy_of(self, piece: _Piece) -> _Copy | None:
        """A copy to undo the piece with; ``None`` where it does not fit, or leaves too little for a second try."""
        copy = attempt(lambda: _Copy(self.optimizer, piece, self._scratch), self._backend, self._position)
        if isinstance(copy, OomEvent) or (piece.num_failures and self._lacks_room(piece, other_bytes=0) is not None):
            return None
        return copy

    def _lacks_room(self, piece: _Piece, other_bytes: int) -> OomEvent | None:
        """The event if what the update of the piece can take at most, and the states of the others, is not there."""
        need_bytes = _TEMPORARIES * piece.num_bytes
        need_bytes += _MOST_STATES * (self._stateless_bytes([piece]) + other_bytes)
        return attempt(lambda: _prove_room(need_bytes, piece.device), self._backend, self._position)

    def _do_without_copy(self, piece: _Piece, other_bytes: int) -> OomEvent | None:
        self._backend.release()
        no_room = self._lacks_room(piece, other_bytes)
        if no_room is not None:
            return no_room
        event = attempt(lambda: self._step_on(piece), self._backend, self._position)
        if event is not None:
            raise _torn(event)
        piece.release_gradients()
        return None

    def _step_on(self, piece: _Piece) -> None:
        with _only(self.optimizer, piece):
            self.optimizer.step()
        failpoint("optimizer")

    def _stateless_bytes(self, pieces: list[_Piece]) -> int:
        """The bytes of the parameters whose states this step will create."""
        state = self.optimizer.state
        return sum(parameter.nbytes for piece in pieces for parameter in piece.parameters() if not state.get(parameter))

    def _state_bytes(self, piece: _Piece) -> int:
        states = (self.optimizer.state[parameter] for parameter in piece.parameters())
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _pieces(optimizer: torch.optim.Optimizer, piece_bytes: int) -> list[_Piece]:
    """The parameters that have a gradient, largest first, in pieces of at most ``piece_bytes`` (or one parameter)."""
    members = [
        (parameter.nbytes, index, parameter)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    members.sort(key=itemgetter(0), reverse=True)
    is_separable = type(optimizer).__module__.startswith("torch.optim.") and not _has_step_hooks(optimizer)
    pieces: list[_Piece] = []
    for num_bytes, group, parameter in members:
        if not pieces or (is_separable and pieces[-1].num_bytes + num_bytes > piece_bytes):
            pieces.append(_Piece(is_separable))
        pieces[-1].add(group, parameter)
    return pieces


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or hooks._global_optimizer_pre_hooks or hooks._global_optimizer_post_hooks)


@contextmanager
def _only(optimizer: torch.optim.Optimizer, piece: _Piece) -> Iterator[None]:
    """Let the optimizer see the parameters of one piece only."""
    whole = [group["params"] for group in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = piece.groups.get(index, [])
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def _prove_room(num_bytes: int, device: torch.device) -> None:
    """Allocate and free ``num_bytes``: raises where they are not to be had."""
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _torn(event: OomEvent) -> TornStepError:
    return TornStepError(
        f"memory ran out inside optimizer.step() of step {event.step} (asked for {format_bytes(event.requested_bytes)} "
        f"with {format_bytes(event.live_bytes)} in use) after part of the parameters had been updated, and "
        "another part failed twice or could not be copied: reload the last checkpoint (`plimsoll train` does it by "
        "itself), and give a larger budget"
    )
