"""Offloading of tensors saved for backward: to a memory-mapped file (CPU), or to pinned host memory (CUDA).

Torch's saved-tensor hooks intercept each saved tensor while ``workload.loss`` runs. Parameters, buffers and their views
stay on the device, as do tensors of integers and storages below `LEAST_BYTES`. Checkpointed blocks save only their
inputs, which are offloaded too. Tensors that are saved during a recomputation are not offloaded.

Numerics: bitwise, backward sees the same values. Does NOT cover sparse tensors, and tensors that a custom function
keeps as attributes. If a saved tensor is changed in place, offloading to host memory raises an error, as plain PyTorch
does. Offloading to a file does not: backward sees the saved values.
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
"""Storages of fewer bytes stay on the device, because a copy would take more time than the freed memory is worth."""

_PLACES = {"cpu": "disk", "cuda": "host"}
_MOST_LEAVING = 1  # storages still on the device while they are copied, in addition to the last one


class ActivationOffload(Technique):
    """`Technique`: offload tensors saved for backward."""

    name = "activation_offload"
    numerics = "bitwise"
    summary = "tensors saved for backward are kept in a memory-mapped file (CPU) or in host memory (CUDA)"
    moves = frozenset({"activations"})
    reaches = frozenset({"activations"})
    needs = frozenset({"loss"})
    works_on_shards = True
    is_for_trainers = True
    not_captured = "activations are copied to the host and back in each pass"
    keeps_state_between_passes = False
    spans_blocks = True
    by_hand = "wrap forward and loss in torch.autograd.graph.save_on_cpu() on a GPU"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice: offload to a file if the device is the CPU, and to host memory on CUDA."""
        return (Choice(technique=self.name, options={"to": _PLACES[setting.device]}),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the device cannot offload to the chosen target, or ``pool_bytes`` is not positive."""
        place = _PLACES[setting.device]
        if choice.options.get("to") != place:
            return f"on {setting.device} activations go to `{place}`, not `{choice.options.get('to')}`: give to={place}"
        if int(choice.options.get("pool_bytes", 1)) <= 0:
            return f"a pool of {choice.options['pool_bytes']} bytes holds nothing: give pool_bytes of 1 or more"
        return None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Wrap the loss with saved-tensor hooks; on exit the loss is restored."""
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
    """The storages that are offloaded now, and the bound on their total bytes."""

    def __init__(self, is_host: bool, most_bytes: int | None) -> None:
        self.pool = PinnedPool() if is_host else MappedPool()
        self.is_host = is_host
        self._most_bytes = most_bytes
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._side: dict[torch.device, SideStream] = {}

    @contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """Offload the tensors that the ``with`` block saves for backward."""
        pass_ = _Pass(self, model)
        try:
            with saved_tensors_hooks(pass_.pack, _unpack):
                yield
        finally:
            pass_.leaving.wait()

    def side(self, device: torch.device) -> SideStream:
        """Return the side stream that copies to and from a device."""
        if device not in self._side:
            self._side[device] = SideStream(device)
        return self._side[device]

    def fits(self, num_bytes: int) -> bool:
        """Return whether a further storage of `num_bytes` keeps the total of offloaded bytes within its bound."""
        return self._most_bytes is None or sum(kept.num_bytes for kept in self._kept) + num_bytes <= self._most_bytes

    def keep(self, whole: Tensor, previous: _Kept | None) -> _Kept:
        """Offload a storage, given as a 1-D tensor, and return its record."""
        kept = _Kept(whole, self, previous)
        self._kept.add(kept)
        return kept


class _Packed(NamedTuple):
    """The object that autograd keeps in place of a saved tensor."""

    kept: _Kept
    size: torch.Size
    strides: tuple[int, ...]
    offset: int
    counter: _Counter | None  # only if it is offloaded to host memory


class _Counter:
    """A detector of in-place changes of a tensor. It does not keep the tensor's memory alive."""

    @torch.no_grad()
    def __init__(self, tensor: Tensor) -> None:
        self._counts = tensor.detach()  # shares the version counter of the tensor ...
        self._counts.data = tensor.detach().new_empty(0)  # ... but not its storage
        self._version = self._counts._version

    def has_moved(self) -> bool:
        """Return whether the tensor has been changed in place since it was saved."""
        return self._counts._version != self._version


class _Pass:
    """The hooks of one forward pass. They offload each storage once."""

    def __init__(self, away: _Away, model: nn.Module) -> None:
        self._away = away
        self._stays = {
            tensor.untyped_storage()._cdata
            for tensor in chain(model.parameters(), model.buffers())
            if tensor.layout is torch.strided
        }
        # Weak references: several forward passes may end before the first backward, or never have a backward.
        self._known: dict[tuple[int, int, torch.dtype], tuple[weakref.ref[Any], weakref.ref[_Kept]]] = {}
        self._last: weakref.ref[_Kept] | None = None
        self.leaving = Leaving(_MOST_LEAVING)

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        """Offload a tensor that is saved for backward, or return it unchanged."""
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
        if previous is not None and self._away.is_host:  # the last storage stays: backward needs it first
            self.leaving.add(previous.send())
        kept = self._away.keep(whole, previous)
        self._known[key] = weakref.ref(storage), weakref.ref(kept)
        self._last = weakref.ref(kept)
        return kept


class _Kept:
    """One offloaded storage, as a 1-D tensor, and its copy on the device while backward needs it.

    The object lives as long as the autograd graph, so an abandoned step leaves no offloaded storage behind.
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
        """Start to copy the storage to the host. Its device memory is free once the device has waited for the copy."""
        assert self._here is not None
        self._away = self._pool.empty_like(self._here)
        self._transfer = self._side.send([(self._away, self._here)])
        self._device, self._here = self._here.device, None
        return self._transfer

    def use(self) -> Tensor:
        """Return the storage as a 1-D tensor that the device can read."""
        self._fetch()
        if self._transfer is not None:
            self._transfer.wait()
        here = self._here
        assert here is not None
        self.num_uses -= 1
        if self.num_uses <= 0 and self._away is not None:
            self._here = None
        previous = self._previous() if self._previous is not None else None
        if previous is not None and previous.num_uses > 0:  # backward most likely needs it next
            previous._fetch()
        return here

    def _fetch(self) -> None:
        if self._here is not None or self._away is None:
            return
        if self._transfer is None:  # a memory-mapped file, which backward reads directly
            self._here = self._away
            return
        self._transfer.wait()
        self._here = torch.empty(self._away.shape, dtype=self._away.dtype, device=self._device)
        self._transfer = self._side.bring([(self._here, self._away)])


def _counts_alone(tensor: Tensor) -> bool:
    """Return whether other parts of a tensor's storage may have changed without changing the tensor's version counter.

    Usually all views of a storage share one version counter. The chunks from ``unsafe_chunk`` do not: each has its own
    counter. Torch's LSTM and GRU cells on the CPU change such chunks, the gates of a step, in place.
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
