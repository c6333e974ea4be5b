"""`optimizer.step()` as a transaction: either the whole update happens, or none of it.

If the peak memory of the update is known and shown to be free, the whole update runs in one call. Otherwise it runs in
chunks of a few parameters. Values and states of these parameters are copied just before, so that a chunk can always be
undone.

Covers the optimizers of ``torch.optim``. Other optimizers, and optimizers with step hooks, may use all parameters, even
parameters without a gradient. Such an optimizer is called once, and all state that it reaches is restored if the call
fails (`plimsoll.step.update.undo`).

Not handled: any error between two chunks except running out of memory, such as Ctrl-C in a user's loop. `TornStepError`
is raised if an update in one call runs out of memory after all, or if a chunk that cannot be split keeps failing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from plimsoll.device.base import Backend
from plimsoll.device.off_device import copier_of, is_marked, keeps_states_outside, lender_of, outside_the_device
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import TornStepError
from plimsoll.models.optimizers import is_of_torch, is_separable
from plimsoll.records.run import OomEvent
from plimsoll.step.collective import agreed
from plimsoll.step.failpoints import failpoint
from plimsoll.step.folding.updates import FoldedUpdates
from plimsoll.step.oom_boundary import Position, attempt
from plimsoll.step.undo.snapshot import MOST_TRIES, Change
from plimsoll.step.update.scratch import ADDRESS_OF, Layout, Scratch
from plimsoll.step.update.sparse import bytes_of, is_sparse
from plimsoll.step.update.transient_memory import (
    MOST_STATES,
    Members,
    blocks_of_states,
    blocks_of_temporaries,
    most_at_once,
    prove_room,
    without_states,
)
from plimsoll.step.update.undo import ChunkCopy, Learned, Memory, WholeCopy

# On the CPU, a chunk stays in the cache between its copy and its update. On a GPU, small chunks cost extra launches.
_CHUNK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
# Parameters that a GPU training stores on the host are updated there. These chunks fit in the cache, too. They are
# larger because many threads share the work of each call, so fewer calls are faster.
_OUTSIDE_CHUNK_BYTES = 8 << 20
# On the CPU, the memory of copies is kept between steps. Otherwise the C library would return this memory to the system
# in every step. That takes up to twice as long as the copying. On a GPU, CUDA's allocator caches the memory.
_KEPT_BYTES = {"cpu": 8 << 20, "cuda": 0}
_OUTSIDE_KEPT_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}


@dataclass(slots=True)
class _Chunk:
    """Parameters that are updated in one call; ``groups`` maps the index of a parameter group to its parameters.

    ``is_separable`` is true if the optimizer updates each parameter separately. Otherwise the chunk represents the
    whole optimizer, and has all parameters with gradients. ``left`` holds changes of a failed try that a retry keeps.
    """

    is_separable: bool
    groups: dict[int, list[nn.Parameter]] = field(default_factory=dict)
    parameters: list[nn.Parameter] = field(default_factory=list)
    num_bytes: int = 0
    num_failures: int = 0
    left: list[Change] = field(default_factory=list)
    changes_gradients: bool = False
    layout: Layout | None = None

    @property
    def place(self) -> _Place:
        """The device of the chunk's parameters and whether they are stored outside it; the CPU without parameters."""
        return _place_of(self.parameters[0]) if self.parameters else (torch.device("cpu"), False)

    def add(self, group: int, parameter: nn.Parameter) -> None:
        self.groups.setdefault(group, []).append(parameter)
        self.parameters.append(parameter)
        self.num_bytes += _cut_bytes(parameter)

    def members(self) -> Members:
        """Return the parameters, each with the index of its group."""
        return [(group, parameter) for group, parameters in self.groups.items() for parameter in parameters]

    def release_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def can_be_cut(self) -> bool:
        return self.is_separable and len(self.parameters) > 1

    def may_be_tried_again(self) -> bool:
        """Count a failure. Return whether to retry: the chunk can be split, failed once, or left useful changes."""
        self.num_failures += 1
        goes_on = bool(self.left) and self.num_failures < MOST_TRIES
        return self.can_be_cut() or self.num_failures == 1 or goes_on

    def halves(self) -> list[_Chunk]:
        """Return the chunk as two halves, or itself if it cannot be split."""
        if not self.can_be_cut():
            return [self]
        members = self.members()
        parts = [_Chunk(is_separable=True), _Chunk(is_separable=True)]
        for number, (group, parameter) in enumerate(members):
            parts[number * 2 // len(members)].add(group, parameter)
        return parts


_Place = tuple[torch.device, bool]
"""A device, and whether the parameters are stored outside it (a dry run has one device only)."""


def _place_of(parameter: nn.Parameter) -> _Place:
    return parameter.device, is_marked(parameter)


class StepCommit:
    """Runs the step of one optimizer as a transaction.

    It has ``param_groups`` and ``step`` like the optimizer, so that a ``GradScaler`` accepts it in place of the
    optimizer.

    Args:
        optimizer: the optimizer; each gradient is freed once it has been used.
        backend: the backend of the device.
        position: the position of the run, for the record of an event.
        chunk_bytes: size of the chunks in bytes; ``None`` updates in one call if possible, otherwise in chunks that
            suit the device.
        ranks: ranks that perform the same step on the same gradients. The step can be undone on all ranks as long as it
            can be undone on this one.

    Attributes:
        folded: in a dry run whose passes repeat, runs only one of several alike chunks; otherwise ``None``.
        outcome: the event that prevented the last step; ``None`` if the step was completed.
        was_called: whether `step` was called.
        recovered: out-of-memory events that did not prevent the step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        backend: Backend,
        position: Position,
        chunk_bytes: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.folded: FoldedUpdates | None = None  # set in a dry run whose passes repeat
        self.outcome: OomEvent | None = None
        self.was_called = False
        self.recovered: list[OomEvent] = []
        self._backend = backend
        self._position = position
        self._scratch = _scratch_by_place(backend)
        self._plain: list[nn.Parameter] = []  # parameters found to be plain CPU tensors; a new check costs more
        self._chunks: list[_Chunk] = []
        self._made_for: object = None
        if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):  # a wrapper may have no hooks
            optimizer.register_load_state_dict_post_hook(lambda _: self.forget())
        self._goes_at_once = chunk_bytes is None and (ranks is None or ranks.is_alone)
        self._chunk_bytes = chunk_bytes or _CHUNK_BYTES[backend.kind]
        self._ranks = ranks or Ranks()
        self._is_undone_by_all = False
        self._changes_gradients: bool | None = None
        self._learned = Learned(optimizer)  # for an optimizer that is updated as a whole
        self._changers: dict[object, bool] = {}  # whether chunked updates change gradients, by the optimizer's settings

    def forget(self) -> None:
        """Drop the scratch memory and the references to optimizer states, which are kept between steps."""
        self._scratch = _scratch_by_place(self._backend)
        self._plain, self._chunks, self._made_for = [], [], None
        self._learned.kept.forget()

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Perform the whole step or none of it, and set ``outcome`` to ``None`` or to the event that prevented it.

        Events that did not prevent it are added to ``recovered``.

        Raises:
            TornStepError: if memory ran out and the step can neither be completed nor undone.
        """
        self.was_called = True
        self.outcome = None
        if not self._is_done_at_once():
            self._do_in_chunks()

    def _is_done_at_once(self) -> bool:
        """Run the whole update in one call if its peak memory is known and free, and return whether it ran.

        Too little free memory is not an event, because the update may need less in chunks.

        Raises:
            TornStepError: if memory ran out although enough was free.
        """
        members = _members(self.optimizer)
        if not self._goes_at_once or not self._is_known(members):
            return False
        with ExitStack() as stack:
            created = without_states(self.optimizer, members)
            sizes = most_at_once(self.optimizer, members, created)
            # A failed reservation would leave blocks in the heap that states cannot use. The reserved memory is freed
            # just before the update. Only another thread that takes it and all other free memory could tear the update.
            with self._backend.without_holes() if created else nullcontext():
                is_reserved = attempt(lambda: self._reserved(sizes, stack), self._backend, self._position)
            if is_reserved is not True:
                return False
            stopped = attempt(lambda: failpoint("optimizer"), self._backend, self._position)
            if stopped is not None:
                self.recovered.append(stopped.model_copy(update={"action": "update not started, done in chunks"}))
                return False
            event = attempt(self.optimizer.step, self._backend, self._position)
        if event is not None:
            raise _torn(event)
        for _, parameter in members:
            parameter.grad = None
        return True

    def _is_known(self, members: Members) -> bool:
        """Return whether the peak memory of an update of these parameters is known."""
        optimizer = self.optimizer
        parameters = [parameter for _, parameter in members]
        if len(parameters) != len(self._plain) or not all(map(operator.is_, parameters, self._plain)):
            self._plain = parameters if all(map(_is_on_the_host, parameters)) else []
        return (
            bool(self._plain)
            and is_of_torch(optimizer)
            and is_separable(optimizer)  # hooks may allocate any amount
            and not keeps_states_outside(optimizer)
            and not any(group.get("differentiable") for group in optimizer.param_groups)
            and not any(map(is_sparse, parameters))
            and _get_current_dispatch_mode() is None  # its operators may allocate any amount
        )

    def _reserved(self, sizes: list[int], stack: ExitStack) -> bool:
        """Reserve blocks of these sizes until the stack is closed, and return whether the backend could do so."""
        reserved = self._backend.reserved(sizes)
        return reserved is not None and stack.enter_context(reserved) is None

    def _do_in_chunks(self) -> None:
        chunks, switches = self._whole(), _switches_of(self.optimizer)
        self._changes_gradients = self._changers.get(switches)
        creates_states = bool(self._stateless(chunks))
        # New states are allocated while gradients are freed. Mixed in one heap, neither could use the other's holes.
        with self._backend.without_holes() if creates_states else nullcontext():
            # States that leave the device with their chunk take no device memory from later chunks.
            self._do_one_by_one(chunks[::-1], must_prove=creates_states and not keeps_states_outside(self.optimizer))
        if self.outcome is None:
            self._changers[switches] = any(chunk.changes_gradients for chunk in chunks)

    def _do_one_by_one(self, waiting: list[_Chunk], must_prove: bool) -> None:
        # The largest chunk comes first and needs most memory. The states of later chunks are proven to fit with it, and
        # each finished chunk frees its gradients. So memory runs out in the first chunk, while all can be undone. If
        # other code takes memory later, the chunk is undone and repeated, in halves if it can be split.
        nothing_happened = True
        while waiting:
            chunk = waiting.pop()
            self._is_undone_by_all = nothing_happened
            must_fit = waiting[::-1] if must_prove and nothing_happened else []
            others = [one for one in must_fit if one.place == chunk.place]
            with outside_the_device() if chunk.place[1] else nullcontext():
                do_chunk = partial(self._do, chunk, others)
                event = do_chunk() if others or self.folded is None else self.folded.run(chunk.members(), do_chunk)
            if event is None:
                nothing_happened = False
                continue
            self._backend.release()
            if chunk.may_be_tried_again():
                self.recovered.append(event.model_copy(update={"action": "part of the update undone and repeated"}))
                waiting.extend(reversed(chunk.halves()))
            elif nothing_happened:
                self.outcome = event
                return
            else:
                raise _torn(event)

    def _whole(self) -> list[_Chunk]:
        """Return the chunks of the whole step; reuse the previous ones if the parameters have not changed."""
        members, can_be_cut = _members(self.optimizer), is_separable(self.optimizer)
        made_for = (can_be_cut, [(group, id(parameter), parameter.nbytes) for group, parameter in members])
        if made_for != self._made_for:  # the ids are valid: the chunks keep the parameters alive
            self._chunks, self._made_for = _chunks(members, can_be_cut, self._chunk_bytes), made_for
        for chunk in self._chunks:
            chunk.num_failures, chunk.left = 0, []
        return self._chunks

    def _do(self, chunk: _Chunk, others: list[_Chunk]) -> OomEvent | None:
        """Update one chunk and release its gradients. If memory runs out, leave it unchanged and return the event.

        ``others`` are chunks that are updated later. If their update would not fit, this chunk is undone.
        """
        copy = self._copy_of(chunk)
        if copy is None:
            return self._do_without_copy(chunk, others)
        is_done = False
        try:
            event = attempt(lambda: self._run(chunk, copy), self._backend, self._position)
            if event is None and self._stateless(others):
                times = self._state_bytes(chunk) / max(chunk.num_bytes, 1)
                event = self._lacks_room(others, times, is_next=True)
            event = self._agreed(event)
            if event is None and isinstance(copy, ChunkCopy):
                copy.keep()
            is_done = event is None
        finally:
            if not is_done:
                self._undo(chunk, copy)
        if event is None:
            chunk.layout = copy.layout
            chunk.release_gradients()
        return event

    def _run(self, chunk: _Chunk, copy: ChunkCopy | WholeCopy) -> None:
        work = partial(self._step_on, chunk)
        if isinstance(copy, WholeCopy):
            copy.run(work, chunk.left if chunk.num_failures > 1 else [])
        else:
            copy.run(work)
            chunk.changes_gradients = bool(copy.changes_gradients)

    def _undo(self, chunk: _Chunk, copy: ChunkCopy | WholeCopy) -> None:
        """Restore the chunk from its copy. If memory runs out, free cached memory and try once more.

        Raises:
            TornStepError: if the copy cannot be restored.
        """
        event = attempt(copy.restore, self._backend, self._position)
        if event is not None:
            self._backend.release()
            event = attempt(copy.restore, self._backend, self._position)
        if event is not None:
            raise _torn(event)
        if isinstance(copy, WholeCopy):
            if copy.lost:
                raise TornStepError(
                    f"memory ran out inside optimizer.step() of step {self._position.step + 1}, and "
                    f"{', '.join(copy.lost)} cannot be put back: reload the last checkpoint"
                )
            # A retry keeps the changes that only failures make in Python (`plimsoll.step.undo.snapshot`). But all
            # ranks must retry equally often, and if gradients are lost, the whole step must be repeated.
            is_further = chunk.num_failures < 2 or copy.changes != chunk.left
            may_go_on = is_further and self._ranks.is_alone and not copy.has_lost_gradients
            chunk.left = copy.changes if may_go_on else []
            chunk.num_failures += copy.has_lost_gradients

    def _copy_of(self, chunk: _Chunk) -> ChunkCopy | WholeCopy | None:
        """Return a copy from which to restore the chunk; ``None`` if it leaves too little memory for an update."""
        copy = attempt(lambda: self._copied(chunk), self._backend, self._position)
        if isinstance(copy, OomEvent):
            self._scratch[chunk.place[1]].clear()
            self._backend.release()
            copy = attempt(lambda: self._copied(chunk), self._backend, self._position)
        if isinstance(copy, OomEvent) or (chunk.num_failures and self._lacks_room([chunk]) is not None):
            return None
        chunk.layout = copy.layout
        return copy

    def _copied(self, chunk: _Chunk) -> ChunkCopy | WholeCopy:
        memory = Memory(chunk.layout, self._scratch[chunk.place[1]], copier_of(self.optimizer))
        if chunk.is_separable:
            memory = memory._replace(lender=lender_of(self.optimizer))
            return ChunkCopy(self.optimizer, chunk.members(), memory, self._changes_gradients)
        return WholeCopy(self.optimizer, self._learned, memory, self._backend, is_again=chunk.num_failures > 0)

    def _lacks_room(self, chunks: list[_Chunk], times: float = MOST_STATES, is_next: bool = False) -> OomEvent | None:
        """Return an event if too little memory is free to update the chunks one after another, otherwise ``None``.

        The peak is all new states plus the largest temporaries of any chunk. Unknown states are assumed to take
        ``times`` the parameters' bytes. If ``is_next``, the previous chunk frees gradients, which on a GPU cover the
        temporaries. This does not hold on the CPU: an aligned block does not fit in a hole of its size.
        """
        blocks = blocks_of_states(self.optimizer, self._stateless(chunks), times)
        if not is_next or self._backend.kind == "cpu":
            blocks += max((blocks_of_temporaries(self.optimizer, chunk.members()) for chunk in chunks), key=sum)
        return attempt(lambda: prove_room(blocks, chunks[0].place[0]), self._backend, self._position)

    def _agreed(self, event: OomEvent | None) -> OomEvent | None:
        """Exchange an event of the first chunk with all ranks, so that all or none update. Later events stay local."""
        return agreed(event, self._position, self._ranks) if self._is_undone_by_all else event

    def _do_without_copy(self, chunk: _Chunk, others: list[_Chunk]) -> OomEvent | None:
        """Update a chunk that cannot be undone, after proving that its peak memory is free.

        Returns:
            An event if too little memory is free and the chunk was not updated, otherwise ``None``.

        Raises:
            TornStepError: if memory runs out in the update after all.
        """
        self._scratch[chunk.place[1]].clear()
        self._backend.release()
        no_room = self._agreed(self._lacks_room([chunk, *others]))
        if no_room is not None:
            return no_room
        event = attempt(lambda: self._step_on(chunk), self._backend, self._position)
        if event is not None:
            raise _torn(event)
        chunk.release_gradients()
        return None

    def _step_on(self, chunk: _Chunk) -> None:
        """Call the optimizer for one chunk only, or for all its parameters if the chunk is not separable."""
        with only(self.optimizer, chunk.groups) if chunk.is_separable else nullcontext():
            self.optimizer.step()
        failpoint("optimizer")

    def _stateless(self, chunks: list[_Chunk]) -> Members:
        """Return the parameters whose states do not exist yet and will be created in this step."""
        return [member for chunk in chunks for member in without_states(self.optimizer, chunk.members())]

    def _state_bytes(self, chunk: _Chunk) -> int:
        states = (self.optimizer.state.get(parameter, {}) for parameter in chunk.parameters)
        return sum(bytes_of(value) for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _members(optimizer: torch.optim.Optimizer) -> Members:
    """Return the parameters that have a gradient, each with the index of its group."""
    groups = enumerate(optimizer.param_groups)
    return [
        (index, parameter) for index, group in groups for parameter in group["params"] if parameter.grad is not None
    ]


def _is_on_the_host(parameter: nn.Parameter) -> bool:
    return type(parameter) in ADDRESS_OF and parameter.is_cpu and not is_marked(parameter)


def _chunks(members: Members, can_be_cut: bool, chunk_bytes: int) -> list[_Chunk]:
    """Divide the members into chunks of at most ``chunk_bytes``; a larger parameter is a chunk of its own.

    The largest parameters come first, and tables in host memory last.
    """
    chunks: list[_Chunk] = [] if can_be_cut else [_Chunk(is_separable=False)]  # it has a step even without members
    for group, parameter in sorted(members, key=_order):
        most_bytes = min(chunk_bytes, _OUTSIDE_CHUNK_BYTES) if is_marked(parameter) else chunk_bytes
        is_full = chunks and (
            chunks[-1].num_bytes + _cut_bytes(parameter) > most_bytes or chunks[-1].place != _place_of(parameter)
        )
        if not chunks or (can_be_cut and is_full):
            chunks.append(_Chunk(can_be_cut))
        chunks[-1].add(group, parameter)
    return chunks


def _scratch_by_place(backend: Backend) -> dict[bool, Scratch]:
    """Return scratch memory for parameters on the device (False) and outside it (True)."""
    return {False: Scratch(_KEPT_BYTES[backend.kind]), True: Scratch(_OUTSIDE_KEPT_BYTES[backend.kind])}


def _order(member: tuple[int, nn.Parameter]) -> tuple[bool, bool, int]:
    _, parameter = member
    return parameter.is_cpu, is_marked(parameter), -_cut_bytes(parameter)


def _cut_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of a parameter, or of its largest shard if it is sharded: the same number on all ranks."""
    num_bytes: int = getattr(parameter, "cut_bytes", parameter.nbytes)
    return num_bytes


@contextmanager
def only(optimizer: torch.optim.Optimizer, members: dict[int, list[nn.Parameter]]) -> Iterator[None]:
    """Restrict the optimizer to some parameters during the block.

    Args:
        optimizer: the optimizer.
        members: maps the index of a group to its parameters.
    """
    whole = [group["params"] for group in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = members.get(index, [])
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def _switches_of(optimizer: torch.optim.Optimizer) -> object:
    """Return which settings of each parameter group are nonzero or true.

    These settings determine which tensors an update writes.
    """
    plain = (bool, int, float, type(None))
    groups = optimizer.param_groups
    return str([[bool(value) for value in group.values() if type(value) in plain] for group in groups])


def _torn(event: OomEvent) -> TornStepError:
    return TornStepError(
        f"memory ran out inside optimizer.step() of step {event.step} ({event.shortage}) after part of the parameters "
        "had been updated, and another part failed twice or could not be copied: reload the last checkpoint "
        "(`plimsoll train` does so automatically), and give a larger budget"
    )
