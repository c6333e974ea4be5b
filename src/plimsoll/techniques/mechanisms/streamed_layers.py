"""Streaming of blocks: parameters live elsewhere, and are on the device only while their block computes.

    with streamed(model, ["transformer.h.0", ...], device=device):
        model(**batch)

A parameter's home is the parameter itself, on the host, or a tensor that ``home_of`` returns. In training the home is
the parameter: its gradient goes there, and the optimizer updates it there. For inference the home is a tensor in pinned
memory or in a read-only mapping of a file. At most two blocks are on the device: while one block computes, the next is
copied.

On the CPU, which serves tests only, copies are synchronous.

Not handled: parameters that are not plain dense tensors, or that a block shares with a module that is not streamed;
they stay where they are. Also not handled: recurrent layers (they keep lists of their weights), and code that reads a
block's parameters while the block does not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from plimsoll.device.mapped_memory import dense_strides
from plimsoll.techniques.mechanisms.forwards import replaced_forward
from plimsoll.techniques.mechanisms.pinned import PinnedPool
from plimsoll.techniques.mechanisms.side_stream import Leaving, SideStream, Transfer

HomeOf = Callable[[str, nn.Parameter], Tensor]
"""``(qualified name, parameter) -> home``: the tensor with the parameter's values, of its shape and dtype."""

# Raised by torch to end a recomputation early. It is private in torch; if a version lacks it, blocks are copied twice.
_STOPS: tuple[type[BaseException], ...] = tuple(filter(None, [getattr(checkpoint, "_StopRecomputationError", None)]))
_MOST_LEAVING = 2  # number of gradients that may be on the device while they are copied
_AT_ONCE = 1 << 63  # a sequence number; autograd runs the ready node with the highest number first


@contextmanager
def streamed(
    model: nn.Module,
    block_names: Sequence[str],
    *,
    device: torch.device,
    home_of: HomeOf | None = None,
    is_cyclic: bool = False,
) -> Iterator[None]:
    """Run some blocks of a model on copies of their parameters; the exit restores the model.

    Args:
        model: the model. Parameters outside these blocks are on ``device``. A parameter for which ``home_of`` returns
            another tensor needs no memory of its own.
        block_names: qualified names of the blocks, in execution order.
        device: the device that computes.
        home_of: returns the home of a parameter, given its name and the parameter; by default the parameter itself.
        is_cyclic: whether a pass without gradients prefetches the first block while the last one computes, for the next
            pass.
    """
    homes = streamable_parameters(model, block_names)
    blocks = [_Block(model.get_submodule(name), name, homes, home_of) for name in block_names]
    stream = _Stream(blocks, device, is_cyclic)
    with ExitStack() as stack:
        stack.callback(stream.clear)
        for number, block in enumerate(blocks):
            stack.enter_context(replaced_forward(block.module, _Forward(stream, number, block.module.forward)))
        yield


def streamable_parameters(model: nn.Module, block_names: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters of blocks that can be streamed: plain, dense, and not shared with the rest of the model."""
    within = Counter(one for name in block_names for one in _all_parameters(model.get_submodule(name)))
    everywhere = Counter(_all_parameters(model))
    return {one for one, times in within.items() if everywhere[one] == times and _is_plain(one)}


def _all_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module and its submodules, each as often as modules refer to it."""
    for part in module.modules():
        yield from (one for one in part._parameters.values() if one is not None)


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) in {nn.Parameter, FakeTensor} and parameter.layout is torch.strided


class _Place(NamedTuple):
    """A module's entry for a parameter (dictionary and key), and the index of the parameter's home."""

    parameters: dict[str, Any]
    key: str
    number: int


class _Block:
    """One block, with the entries of its parameters in modules and the homes of these parameters."""

    def __init__(self, module: nn.Module, name: str, streamable: set[nn.Parameter], home_of: HomeOf | None) -> None:
        self.module = module
        self.homes: list[Tensor] = []
        self.places: list[_Place] = []
        numbers: dict[nn.Parameter, int] = {}
        for path, part in module.named_modules(prefix=name):
            for key, parameter in part._parameters.items():
                if parameter is None or parameter not in streamable:
                    continue
                if parameter not in numbers:
                    numbers[parameter] = len(self.homes)
                    self.homes.append(home_of(f"{path}.{key}", parameter) if home_of else parameter)
                self.places.append(_Place(part._parameters, key, numbers[parameter]))

    @contextmanager
    def having(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Replace the parameters of the streamed block by other tensors while the context is active."""
        before = [place.parameters[place.key] for place in self.places]
        try:
            for place in self.places:
                place.parameters[place.key] = tensors[place.number]
            yield
        finally:
            for place, parameter in zip(self.places, before, strict=True):
                place.parameters[place.key] = parameter


@dataclass
class _Here:
    """Copies of a block's parameters on the device.

    ``versions``: the version counters of the parameters' homes when they were copied. ``arrival``: the transfer to wait
    for before the copies are read; ``None``: there is no transfer to wait for.
    """

    copies: list[Tensor]
    versions: list[int]
    arrival: Transfer | None = None

    def wait(self) -> None:
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None


class _Stream:
    """The streamed blocks, and the copies of blocks that are on the device now."""

    def __init__(self, blocks: Sequence[_Block], device: torch.device, is_cyclic: bool) -> None:
        self.blocks, self._device, self._is_cyclic = blocks, device, is_cyclic
        self._pool = PinnedPool()
        self._side = SideStream(device)
        self._leaving = Leaving(_MOST_LEAVING)
        self._here: dict[int, _Here] = {}
        self._cleared_after: int | None = None

    def run(self, number: int, forward: Callable[[], Any]) -> Any:
        """Compute a block on copies of its parameters."""
        block, in_backward = self.blocks[number], _graph_task() is not None
        here = self.fetch(number)
        tensors = here.copies
        hooks: AbstractContextManager[None] = nullcontext()
        if torch.is_grad_enabled():
            pairs = zip(block.homes, here.copies, strict=True)
            tensors = [_on_the_way(home, copy, self) for home, copy in pairs]
            hooks = _hooks(self, number, here.copies)
        is_done = False
        try:
            with block.having(tensors), hooks:
                result = forward()
            is_done = True
        except _STOPS:
            is_done = True
            raise
        finally:
            if not is_done:
                self.clear()
            elif not in_backward:  # in backward, autograd reads the copies next
                self._drop(number)
        return result

    def fetch(self, number: int) -> _Here:
        """Return a block's copies, prefetch the next block (in backward the previous), and drop all other copies."""
        in_backward, num_blocks = _graph_task() is not None, len(self.blocks)
        following = number - 1 if in_backward else number + 1
        if self._is_cyclic and not torch.is_grad_enabled():
            following %= num_blocks
        for other in [one for one in self._here if one not in {number, following}]:
            self._drop(other)
        if in_backward:
            self._clear_after_backward()
        else:
            self._leaving.wait()  # a failed backward may have left transfers
        here = self._start(number)
        here.wait()
        if 0 <= following < num_blocks and following != number:
            self._start(following)
        return here

    def send_home(self, gradient: Tensor) -> tuple[Tensor, Transfer]:
        """Start to copy a gradient to the host; return the copy, and the transfer to wait for before reading it."""
        target = self._pool.empty_like(gradient, self._device)
        transfer = self._side.send([(target, gradient)])
        self._leaving.add(transfer)
        return target, transfer

    def clear(self) -> None:
        """Drop all copies on the device."""
        self._cleared_after = None
        self._leaving.wait()
        for number in [*self._here]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        here = self._here.pop(number, None)
        if here is not None:  # a transfer that nobody waited for may still write to the memory that is freed now
            here.wait()

    @torch.no_grad()
    def _start(self, number: int) -> _Here:
        homes = self.blocks[number].homes
        here = self._here.get(number)
        if here is not None and here.versions == [home._version for home in homes]:
            return here
        self._drop(number)
        here = self._here[number] = _Here([], [])  # no version until all copies have been requested
        for home in homes:
            made = torch.empty_strided(home.shape, dense_strides(home), dtype=home.dtype, device=self._device)
            here.copies.append(made)
        here.arrival = self._side.bring([(made, home.detach()) for made, home in zip(here.copies, homes, strict=True)])
        here.versions = [home._version for home in homes]
        return here

    def _clear_after_backward(self) -> None:
        """Register a callback, once per backward, that drops all copies when backward ends."""
        if self._cleared_after != _graph_task():
            self._cleared_after = _graph_task()
            torch.autograd.Variable._execution_engine.queue_callback(self.clear)


class _Forward:
    """The forward of a streamed block.

    It is an object, not a closure, so that a deep copy of the model calls its own blocks.
    """

    def __init__(self, stream: _Stream, number: int, forward: Callable[..., Any]) -> None:
        self._stream, self._number, self.forward = stream, number, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stream.run(self._number, lambda: self.forward(*args, **kwargs))


def _on_the_way(home: Tensor, copy: Tensor, stream: _Stream) -> Tensor:
    """Return a parameter's copy, connected to its home by autograd, so that the gradient flows to the home."""
    passage = _Passage(stream, home.device)
    left = _Leave.apply(home, passage)  # type: ignore[no-untyped-call]
    arrived: Tensor = _Arrive.apply(left, copy, passage)  # type: ignore[no-untyped-call]
    if arrived.grad_fn is not None:
        # With its own number it would run after all ops of the block, and all gradients would be sent at the end.
        arrived.grad_fn._set_sequence_nr(_AT_ONCE)  # type: ignore[attr-defined]
    return arrived


@dataclass
class _Passage:
    """The transfer of one gradient to its home, which involves two autograd threads.

    The device's thread starts it and continues at once. The thread that called backward waits for it, and accumulates
    the gradient.
    """

    stream: _Stream
    home: torch.device
    transfer: Transfer | None = None


class _Arrive(torch.autograd.Function):
    """The device side of a `_Passage`: backward starts the copy of the gradient and does not wait."""

    @staticmethod
    def forward(ctx: Any, home: Tensor, copy: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        passage: _Passage = ctx.passage
        if gradient.layout is not torch.strided:
            return gradient.to(passage.home), None, None
        target, passage.transfer = passage.stream.send_home(gradient)
        return target, None, None


class _Leave(torch.autograd.Function):
    """The host side of a `_Passage`: backward waits for the copy, because autograd then accumulates the gradient."""

    @staticmethod
    def forward(ctx: Any, home: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        return home.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        transfer, ctx.passage.transfer = ctx.passage.transfer, None
        if transfer is not None:
            transfer.synchronize()
        return gradient, None


class _Ref(NamedTuple):
    """A reference that autograd saves in place of a parameter's copy or its view. Backward copies the block again."""

    stream: _Stream
    block: int
    copy: int
    size: torch.Size
    strides: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        copy = self.stream.fetch(self.block).copies[self.copy]
        return copy.as_strided(self.size, self.strides, self.offset)


def _hooks(stream: _Stream, block: int, copies: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Return hooks that replace copies of weights by references, and pass other tensors to the active outer hooks.

    Tensors that forward derives from a weight and saves, such as autocast's cast, are activations: recomputation drops
    them.
    """
    number_of = {copy.untyped_storage()._cdata: number for number, copy in enumerate(copies)}
    outer = _hooks_in_force()

    def pack(tensor: Tensor) -> Any:
        if tensor.layout is torch.strided:
            number = number_of.get(tensor.untyped_storage()._cdata)
            if number is not None:
                return _Ref(stream, block, number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return tensor if outer is None else _Outer(outer[1], outer[0](tensor))

    return saved_tensors_hooks(pack, _unpack)


class _Outer(NamedTuple):
    """A saved tensor that outer hooks have packed, and their function that unpacks it."""

    unpack: Callable[[Any], Tensor]
    packed: Any


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _Ref):
        return packed.tensor()
    if isinstance(packed, _Outer):
        return packed.unpack(packed.packed)
    assert isinstance(packed, Tensor)
    return packed


def _hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the active saved-tensor hooks; ``None`` without hooks, or if torch lacks this private function."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


def _graph_task() -> int | None:
    """Return the id of the backward that runs in this thread; ``None`` outside of backward. Private in torch."""
    task = int(torch._C._current_graph_task_id())
    return None if task == -1 else task
