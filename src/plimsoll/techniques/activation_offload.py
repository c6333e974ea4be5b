"""What forward saves for backward off the device: in a mapped file (CPU), or in pinned host memory (CUDA).

Torch's hooks on saved tensors see each one while ``workload.loss`` runs. Parameters, buffers and their views stay, as
do integers and whatever is below `LEAST_BYTES`. Blocks that are checkpointed save their inputs only, which are
offloaded too; what a recomputation saves is not.

Numerics: bitwise, backward sees the same values. Does NOT cover tensors that a custom function keeps as attributes and
does not save, saved tensors that are changed in place (plain PyTorch refuses them, and so it is here where they go to
the host; where they go to a file backward sees what was saved), and sparse ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.errors import InputError
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.records.units import format_bytes
from plimsoll.techniques.mechanisms.pinned import PinnedPool
from plimsoll.techniques.mechanisms.side_stream import Leaving, SideStream, Transfer
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

LEAST_BYTES = 1 << 20
"""Smaller storages stay: their copies would cost more than they free."""

_PLACES = {"cpu": "disk", "cuda": "host"}
_MOST_LEAVING = 1  # storages that are still on the device while their copies are on the way, beside the last one


class ActivationOffload(Technique):
    """`Technique`: what forward saves for backward off the device."""

    name = "activation_offload"
    numerics = "bitwise"
    summary = "what backward needs of forward in a mapped file (CPU) or in the host's memory (CUDA)"
    moves = frozenset({"activations"})
    reaches = frozenset({"activations"})
    needs = frozenset({"loss"})
    works_on_shards = True
    is_for_trainers = True
    not_captured = "activations go to the host and come back in each pass"
    keeps_state_between_passes = False
    spans_blocks = True
    by_hand = "wrap forward and loss in torch.autograd.graph.save_on_cpu() on a GPU"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Everything to the one place there is for the device."""
        return (Choice(technique=self.name, options={"to": _PLACES[setting.device]}),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """The place must be one that the device does not count; the bound is a number of bytes."""
        place = _PLACES[setting.device]
        if choice.options.get("to") != place:
            return f"on {setting.device} activations go to `{place}`, not `{choice.options.get('to')}`: give to={place}"
        if int(choice.options.get("pool_bytes", 1)) <= 0:
            return f"a pool of {choice.options['pool_bytes']} bytes holds nothing: give pool_bytes of 1 or more"
        return None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Watch what the loss saves; on exit the loss is the one it was."""
        loss = workload.loss
        most_bytes = choice.options.get("pool_bytes")
        away = _Away(choice.options["to"] == "host", None if most_bytes is None else int(most_bytes))

        def offloaded(model: nn.Module, batch: Any) -> Tensor:
            with away.saving(model):
                return loss(model, batch)

        workload.loss = offloaded
        try:
            yield
        finally:
            workload.loss = loss


class _Away:
    """Where saved storages are kept, and how many bytes of them there are."""

    def __init__(self, is_host: bool, most_bytes: int | None) -> None:
        self.pool = PinnedPool() if is_host else MappedPool()
        self.is_host = is_host
        self._most_bytes = most_bytes
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._side: dict[torch.device, SideStream] = {}

    @contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """Keep here what is saved for backward in the block."""
        pass_ = _Pass(self, model)
        try:
            with saved_tensors_hooks(pass_.pack, _unpack):
                yield
        finally:
            pass_.leaving.wait()

    def side(self, device: torch.device) -> SideStream:
        """The copies to and from a device."""
        if device not in self._side:
            self._side[device] = SideStream(device)
        return self._side[device]

    def fits(self, num_bytes: int) -> bool:
        """Whether so many bytes more are allowed."""
        return self._most_bytes is None or sum(kept.num_bytes for kept in self._kept) + num_bytes <= self._most_bytes

    def keep(self, whole: Tensor, previous: _Kept | None) -> _Kept:
        """Copy a storage away."""
        kept = _Kept(whole, self, previous)
        self._kept.add(kept)
        return kept


class _Packed(NamedTuple):
    """What autograd keeps in place of a saved tensor."""

    kept: _Kept
    size: torch.Size
    strides: tuple[int, ...]
    offset: int
    counter: _Counter | None  # where it goes to the host


class _Counter:
    """Whether a tensor has been changed in place since, of which no memory is kept."""

    @torch.no_grad()
    def __init__(self, tensor: Tensor) -> None:
        self._counts = tensor.detach()  # counts the versions of the tensor ...
        self._counts.data = tensor.detach().new_empty(0)  # ... also without its storage
        self._version = self._counts._version

    def has_moved(self) -> bool:
        """Whether it has."""
        return self._counts._version != self._version


class _Pass:
    """One forward pass: what it saves, each storage once."""

    def __init__(self, away: _Away, model: nn.Module) -> None:
        self._away = away
        self._stays = {
            tensor.untyped_storage()._cdata
            for tensor in chain(model.parameters(), model.buffers())
            if tensor.layout is torch.strided
        }
        # Weakly: as many forward passes as there are may end before their backward, or have none.
        self._known: dict[tuple[int, int, torch.dtype], tuple[weakref.ref[Any], weakref.ref[_Kept]]] = {}
        self._last: weakref.ref[_Kept] | None = None
        self.leaving = Leaving(_MOST_LEAVING)

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        """Take a tensor that is saved for backward."""
        if not self._goes(tensor):
            return tensor
        kept = self._kept(tensor.detach())
        if kept is None:
            return tensor
        kept.num_uses += 1
        counter = _Counter(tensor) if self._away.is_host else None
        return _Packed(kept, tensor.size(), tensor.stride(), int(tensor.storage_offset()), counter)

    def _goes(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.is_inference():
            return False
        storage = tensor.untyped_storage()
        is_worth_it = storage.nbytes() >= LEAST_BYTES and (tensor.is_floating_point() or tensor.dtype is torch.bool)
        return is_worth_it and storage._cdata not in self._stays and storage.nbytes() % tensor.element_size() == 0

    @torch.no_grad()
    def _kept(self, tensor: Tensor) -> _Kept | None:
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version, tensor.dtype
        of, known = self._known.get(key, (None, None))
        kept = known() if known is not None and of is not None and of() is storage else None
        if kept is not None and not _counts_alone(tensor):
            return kept
        if not self._away.fits(storage.nbytes()):
            return None
        whole = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        previous = self._last() if self._last is not None else None
        if previous is not None and self._away.is_host:  # and this one with the next: backward needs the last at once
            self.leaving.add(previous.send())
        kept = self._away.keep(whole, previous)
        self._known[key] = weakref.ref(storage), weakref.ref(kept)
        self._last = weakref.ref(kept)
        return kept


class _Kept:
    """One storage off the device, as a tensor of one dimension, and its copy on the device while backward needs it.

    It lives as long as the graph, so that a step that is given up leaves none.
    """

    def __init__(self, whole: Tensor, away: _Away, previous: _Kept | None) -> None:
        self.num_uses, self.num_bytes = 0, whole.nbytes
        self._pool, self._side = away.pool, away.side(whole.device)
        self._previous = None if previous is None else weakref.ref(previous)
        self._here: Tensor | None = whole
        self._away: Tensor | None = None
        self._transfer: Transfer | None = None
        if not away.is_host:
            self._here, self._away = None, away.pool.copy_of(whole)

    def send(self) -> Transfer:
        """Send it to the host; the device's memory is free when the device has waited for that."""
        assert self._here is not None
        self._away = self._pool.empty_like(self._here)
        self._transfer = self._side.send([(self._away, self._here)])
        self._device, self._here = self._here.device, None
        return self._transfer

    def use(self) -> Tensor:
        """The storage's values where backward can read them."""
        self._fetch()
        if self._transfer is not None:
            self._transfer.wait()
        here = self._here
        assert here is not None
        self.num_uses -= 1
        if self.num_uses <= 0 and self._away is not None:
            self._here = None
        previous = self._previous() if self._previous is not None else None
        if previous is not None and previous.num_uses > 0:  # most likely the next that backward needs
            previous._fetch()
        return here

    def _fetch(self) -> None:
        if self._here is not None or self._away is None:
            return
        if self._transfer is None:  # in a file, which is memory like any other
            self._here = self._away
            return
        self._transfer.wait()
        self._here = torch.empty(self._away.shape, dtype=self._away.dtype, device=self._device)
        self._transfer = self._side.bring([(self._here, self._away)])


def _counts_alone(tensor: Tensor) -> bool:
    """Whether the rest of the storage may have changed since another tensor of this version was saved.

    All views of a storage have one count of versions, but not the parts that a kernel chunks unsafely: torch's LSTM
    and GRU cells on the CPU change the gates of a step in place, part after part, and each part counts for itself.
    """
    return tensor._version > 0 and tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


@torch.no_grad()
def _unpack(packed: Tensor | _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if packed.counter is not None and packed.counter.has_moved():
        raise InputError(
            f"a tensor of {format_bytes(packed.kept.num_bytes)} that backward needs was changed in place after it was "
            "saved; plain PyTorch refuses that, too: write `x = x + y` in place of `x += y`"
        )
    return packed.kept.use().as_strided(packed.size, packed.strides, packed.offset)
