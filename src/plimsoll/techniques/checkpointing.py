"""Activation checkpointing of blocks: their activations are dropped and recomputed in backward.

    Choice(technique="checkpointing", options={"blocks": "all"})     or "every 2", or "0,3-5"

The forward of each chosen block (`mechanisms.blocks.blocks_of`) runs under ``torch.utils.checkpoint``
(https://arxiv.org/abs/1604.06174). Loss and gradients are bitwise identical. The recomputation sees the same random
numbers, autocast state and key-value cache as the first computation, and BatchNorm updates its statistics once.

Does NOT cover blocks that draw random numbers from Python, numpy or a generator of their own, and blocks with side
effects. BatchNorm statistics and a key-value cache are handled; a block that changes another buffer is refused. On
CUDA, recurrent layers with dropout are not covered: cuDNN draws the dropout from a state that torch's checkpoint does
not restore.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from plimsoll.errors import InputError
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.records.trace import Trace
from plimsoll.records.units import format_bytes
from plimsoll.techniques.mechanisms.blocks import Blocks, blocks_of
from plimsoll.techniques.mechanisms.caches import CachesBefore
from plimsoll.techniques.mechanisms.forwards import replaced_forward
from plimsoll.techniques.mechanisms.technique import Choices, Exported, Setting, Technique

_LEAST_SHARE = 0.01  # share of all activations; if blocks save less, recomputing them cannot lower the peak noticeably


class Checkpointing(Technique):
    """`Technique`: recompute the activations of blocks in backward."""

    name = "checkpointing"
    numerics = "bitwise"
    summary = "activations of some or all blocks recomputed in backward"
    modifies = frozenset({"model"})
    reaches = frozenset({"activations"})
    works_on_shards = True
    is_for_trainers = True
    decides_time = True
    keeps_state_between_passes = False
    exports: ClassVar = {
        "transformers": lambda choice, _: (
            Exported({"activation_checkpointing": True}) if choice.options.get("blocks", "all") == "all" else None
        )
    }
    by_hand = "call model.gradient_checkpointing_enable(), which takes all blocks"
    remedies: ClassVar = {"attention_scores": 1}

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return up to three choices: every fourth block, every second block, and all blocks."""
        blocks = blocks_of(workload.model)
        reason = _why_not(blocks, workload, setting) or _too_little(blocks, setting.trace)
        if reason is not None:
            return reason
        texts = [f"every {step}" for step in (4, 2) if len(blocks) > step] + ["all"]
        return tuple(checkpointing_choice(text) for text in texts)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the chosen blocks do not exist, or cannot be checkpointed."""
        blocks = blocks_of(workload.model)
        try:
            numbers = chosen_blocks(str(choice.options["blocks"]), len(blocks))
        except InputError as error:
            return str(error)
        return _why_not(tuple(blocks[number] for number in numbers), workload, setting)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Replace the forward of each chosen block, on the instance."""
        blocks = blocks_of(workload.model)
        numbers = chosen_blocks(str(choice.options["blocks"]), len(blocks))
        with ExitStack() as stack:
            for number in numbers:
                name, block = blocks[number]
                stack.enter_context(replaced_forward(block, _Forward(name, block, block.forward)))
            yield


def checkpointing_choice(blocks: str) -> Choice:
    """Return the choice that checkpoints the blocks that a text selects: ``"all"``, ``"every 2"`` or ``"0,3-5"``."""
    return Choice(technique=Checkpointing.name, options={"blocks": blocks})


def chosen_blocks(text: str, num_blocks: int) -> tuple[int, ...]:
    """Return the indices of the blocks that a text selects.

    "every n" starts with block 0, because it is recomputed last, when most other activations have been freed.

    >>> chosen_blocks("every 2", 5), chosen_blocks("0,3-4", 5)
    ((0, 2, 4), (0, 3, 4))

    Raises:
        InputError: if the text is invalid, or selects a block that does not exist.
    """
    remedy = f"give `all`, `every 2`, or numbers from 0 to {num_blocks - 1} such as `0,3-5`"
    if num_blocks == 0:
        raise InputError(f"checkpointing={text}: the model has no repeated blocks: leave checkpointing out")
    if text == "all":
        return tuple(range(num_blocks))
    word, _, step = text.partition(" ")
    if word == "every" and step.isdecimal() and 0 < int(step) <= num_blocks:
        return tuple(range(0, num_blocks, int(step)))
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()) or (last and int(last) < int(first)):
            raise InputError(f"cannot read the blocks `{text}` at `{part}`: {remedy}")
        numbers.update(range(int(first), int(last or first) + 1))
    if max(numbers) >= num_blocks:
        raise InputError(
            f"checkpointing={text}: there is no block {max(numbers)}, the model has {num_blocks}: {remedy}"
        )
    return tuple(sorted(numbers))


def blocks_as_text(numbers: tuple[int, ...], num_blocks: int) -> str:
    """Return the text that selects these blocks, in the format that `chosen_blocks` reads.

    >>> blocks_as_text((0, 3, 4, 5), 8), blocks_as_text((0, 1), 2)
    ('0,3-5', 'all')
    """
    if len(numbers) == num_blocks:
        return "all"
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


class BlockBytes(NamedTuple):
    """The bytes that one pass of a block saves for backward.

    ``saved_bytes``: without checkpointing. ``kept_bytes``: with checkpointing, which is only the block's output.
    """

    saved_bytes: int
    kept_bytes: int


def saved_per_block(trace: Trace, names: tuple[str, ...]) -> tuple[BlockBytes, ...]:
    """Return the bytes that each block saves for backward, from its largest pass in the last step.

    It counts the storages that are created in the forward of a block and outlive it. The storage that the last op
    creates is assumed to be the block's output, which the next block saves in any case.

    Args:
        trace: The trace of a training without checkpointing.
        names: The names of the blocks, as returned by `blocks_of`.
    """
    block_of_text = np.full(len(trace.texts), -1)
    for number, text in enumerate(trace.texts):
        for block, name in enumerate(names):
            if text == name or text.startswith(f"{name}."):
                block_of_text[number] = block
    is_forward = (np.asarray(trace.ops.phase) == "forward") & (np.asarray(trace.ops.step) == max(trace.ops.step))
    block_of = np.where(is_forward, block_of_text[np.asarray(trace.ops.module, dtype=int)], -1)
    pass_of = np.cumsum(is_forward & ~np.roll(is_forward, 1))
    num_bytes, born, died = (
        np.asarray(column) for column in (trace.storages.num_bytes, trace.storages.born, trace.storages.died)
    )
    is_here = ~np.asarray(trace.storages.on_host, dtype=bool) & (np.asarray(trace.storages.category) == "activations")
    return tuple(
        _largest_pass(block_of == block, pass_of, num_bytes, born, died, is_here) for block in range(len(names))
    )


def _largest_pass(  # noqa: PLR0917 -- columns of one table
    rows: Any, pass_of: Any, num_bytes: Any, born: Any, died: Any, is_here: Any
) -> BlockBytes:
    found = [BlockBytes(0, 0)]
    for number in np.unique(pass_of[rows]):
        own = rows & (pass_of == number)
        end = np.flatnonzero(own)[-1]
        saved = np.flatnonzero(is_here & own[born] & ((died > end) | (died < 0)))
        if len(saved):
            last = saved[born[saved] == born[saved[-1]]]  # a layer norm creates its statistics after its result
            found.append(BlockBytes(int(num_bytes[saved].sum()), int(num_bytes[last].max())))
    return max(found)


def _why_not(blocks: Blocks, workload: Workload, setting: Setting) -> str | None:
    """Return the reason why blocks cannot be checkpointed; ``None`` if they can."""
    if not blocks:
        return f"the model {type(workload.model).__name__} has no repeated blocks"
    if any(getattr(module, "gradient_checkpointing", False) is True for module in workload.model.modules()):
        return (
            "the model checkpoints its layers itself: to let the plan decide, call "
            "`model.activation_checkpointing_disable()`"
        )
    if setting.device == "cuda":
        for name, block in blocks:
            if any(isinstance(part, nn.RNNBase) and part.dropout and part.num_layers > 1 for part in block.modules()):
                return f"{name} has a recurrent layer, and cuDNN would draw another dropout mask in backward"
    return None


def _too_little(blocks: Blocks, trace: Trace | None) -> str | None:
    """Return the reason why checkpointing would save too little memory, according to a trace.

    ``None``: it would save enough, or there is no trace.
    """
    if trace is None:
        return None
    is_kept = np.asarray(trace.storages.category) == "activations"
    is_last = np.asarray(trace.ops.step)[np.asarray(trace.storages.born)] == max(trace.ops.step)
    all_bytes = int(np.asarray(trace.storages.num_bytes)[is_kept & is_last].sum())
    saved_bytes = sum(block.saved_bytes for block in saved_per_block(trace, tuple(name for name, _ in blocks)))
    if saved_bytes > _LEAST_SHARE * all_bytes:
        return None
    return (
        f"the {len(blocks)} blocks save {format_bytes(saved_bytes)} of {format_bytes(all_bytes)} of activations for "
        "backward: recomputing them would not lower the peak"
    )


# -- one block ---------------------------------------------------------------------------------------------------------


class _Forward:
    """The forward of a checkpointed block.

    It is an object, not a closure, so that a deep copy of the model runs the copied block.

    ``forward`` is the original forward.
    """

    def __init__(self, name: str, block: nn.Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.name, self.block, self.forward = name, block, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        call = _Call(self)
        # Positional tensors: torch looks only at these for the devices whose random states it must save.
        return checkpoint(call, *call.take(args, kwargs), use_reentrant=False, preserve_rng_state=True)


class _Call:
    """One call of a block. Its recomputation gets new copies of the key-value caches among the arguments."""

    def __init__(self, of: _Forward) -> None:
        self._of = of
        self._first: tuple[Any, Any] | None = None

    def take(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Store the arguments, and return the tensors among them, which `checkpoint` saves."""
        self._first = args, kwargs
        leaves, self._structure = tree_flatten((args, kwargs), is_leaf=CachesBefore.is_cache)
        self._caches = CachesBefore(leaves)
        self._others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in self._caches.without(leaves)]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def __call__(self, *tensors: Tensor) -> Any:
        """Run or recompute the block."""
        first, self._first = self._first, None
        if first is None:
            return self._again(tensors)
        versions = _versions(self._of.block)
        result = self._of.forward(*first[0], **first[1])
        for (part, name, buffer), version in _versions(self._of.block).items():
            if versions.get((part, name, buffer), version) != version:
                path = next(path for path, one in self._of.block.named_modules() if id(one) == part)
                raise InputError(
                    f"cannot checkpoint {self._of.name}: its forward changes its buffer "
                    f"{f'{path}.{name}' if path else name}, and would do so twice: leave it out with "
                    "`--forbid checkpointing`"
                )
        self._caches.forget_unchanged()
        return result

    def _again(self, tensors: tuple[Tensor, ...]) -> Any:
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self._caches.back_in(self._others)]
        args, kwargs = tree_unflatten(leaves, self._structure)
        with _statistics_kept(self._of.block):
            return self._of.forward(*args, **kwargs)


_TENSOR = object()  # placeholder of a tensor


def _parts(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the block and its submodules. A shared submodule is yielded repeatedly.

    This is ten times as fast as ``block.modules()``.
    """
    waiting = [block]
    while waiting:
        part = waiting.pop()
        yield part
        waiting.extend(one for one in part._modules.values() if one is not None)


def _norms(block: nn.Module) -> list[nn.Module]:
    """Return the layers that keep running statistics in their buffers."""
    return [part for part in _parts(block) if isinstance(part, nn.modules.batchnorm._NormBase)]


def _versions(block: nn.Module) -> dict[tuple[int, str, int], int]:
    """Return the version counters of buffers, by module, name and identity of the buffer.

    Buffers of layers with running statistics are left out, because they may change.
    """
    return {
        (id(part), name, id(buffer)): buffer._version
        for part in _parts(block)
        if part._buffers and not isinstance(part, nn.modules.batchnorm._NormBase)
        for name, buffer in part._buffers.items()
        if buffer is not None
    }


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Restore the running statistics of ``block`` after its recomputation: the first computation has updated them."""
    saved = [(norm._buffers, dict(norm._buffers)) for norm in _norms(block) if norm.training]
    try:
        for buffers, before in saved:
            buffers.update({name: None if one is None else one.clone() for name, one in before.items()})
        yield
    finally:
        for buffers, before in saved:
            buffers.update(before)
