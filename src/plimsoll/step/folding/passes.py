"""Folding of alike passes in a dry run: the events of a pass that has run are repeated in the trace.

In a dry run, most passes cause the same events as an earlier pass. For example, the passes of the first micro-batches
of all steps cause the same events. So each kind of pass runs only once. Passes are of one kind if their known input
values are equal, and the same parameters have gradients before them. Passes are repeated only if

- the code of all modules and hooks belongs to torch, transformers, peft or Plimsoll,
- no technique keeps state between passes (`plimsoll.techniques.Technique`), and
- a pass leaves every attribute of the modules unchanged.

Does not detect changes inside an attribute that is not a collection. Nor does it detect the state of a function that
is registered with a library, such as an attention function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from plimsoll.memory.known_values import known_of
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.repeated import Stretch, name_gradients, place_of
from plimsoll.models.workload import Workload, model_loss
from plimsoll.step.folding.blocks import FoldedBlocks
from plimsoll.step.undo.find_state import is_same
from plimsoll.techniques import Choices, technique_of

_KNOWN_CODE = {"torch", "transformers", "plimsoll", "peft"}
_CALLED = ("func", "__func__", "__wrapped__", "forward")


def passes_repeat(workload: Workload, choices: Choices) -> bool:
    """Return whether passes with equal inputs have the same events in this training run."""
    return (
        workload.loss is model_loss
        and workload.ranks.is_alone
        and workload.hooks.captured is None
        and not any(technique_of(choice.technique).keeps_state_between_passes for choice in choices)
        and all(_is_known(one) for module in workload.model.modules() for one in (type(module), *_put_on(module)))
    )


def _put_on(module: nn.Module) -> Iterator[Any]:
    """Yield the code that runs with a module but is not part of its class: hooks, and a replaced ``forward``."""
    for name, value in vars(module).items():
        if name.endswith("_hooks"):  # a list with such a name holds handles in transformers
            yield from value.values() if isinstance(value, dict) else ()
    if "forward" in vars(module):
        yield module.forward


def _is_known(code: Any) -> bool:
    """Return whether a class, function or callable object, and the code it wraps, belongs to a known library."""
    home = getattr(code, "__globals__", {}).get("__name__") or getattr(code, "__module__", "")
    is_known = isinstance(code, partial | MethodType) or str(home).partition(".")[0] in _KNOWN_CODE
    return is_known and all(_is_known(getattr(code, name)) for name in _CALLED if hasattr(code, name))


class Folded:
    """The forward and backward passes of one dry run, each of which runs or repeats the events of an earlier pass.

    Args:
        recorder: the recorder of the dry run.
        workload: the training run.
        parameters: returns an iterator over the parameters that can have gradients.
        blocks: within the passes that run, skips alike blocks and repeats their events; ``None`` runs all blocks.
    """

    def __init__(
        self,
        recorder: Recorder,
        workload: Workload,
        parameters: Callable[[], Iterable[nn.Parameter]],
        blocks: FoldedBlocks | None = None,
    ) -> None:
        self._recorder, self._workload, self._parameters = recorder, workload, parameters
        self._done: list[_Done] = []
        self._blocks = blocks

    def run(self, micro_batch: Any, is_share: bool, do_pass: Callable[[], Tensor]) -> Tensor:
        """Run a pass, or repeat the events of an alike one.

        Args:
            micro_batch: the inputs of the pass.
            is_share: whether the loss is multiplied by a share, because the micro-batch is only a part of the batch.
            do_pass: runs the pass and returns its loss.
        """
        without = [one for one in dict.fromkeys(self._parameters()) if one.grad is None]
        given = _Given([*map(_known_leaf, tree_leaves(micro_batch))], is_share, without)
        before = [*_attributes_of(self._workload.model)]
        done = next((one for one in self._done if one.given.is_like(given) and is_same(one.before, before)), None)
        if done is not None:
            loss, *gradients = done.stretch.again()
            for parameter, gradient in zip(done.reached, gradients, strict=True):
                parameter.grad = gradient
            if not done.reached:  # all gradients existed, and the pass adds to them
                name_gradients(self._recorder, self._parameters())
            return loss
        begin = place_of(self._recorder)
        with nullcontext() if self._blocks is None else self._blocks.folded():
            loss = do_pass()
        reached = [one for one in without if one.grad is not None]
        stretch = Stretch(self._recorder, begin, [loss, *(one.grad for one in reached if one.grad is not None)])
        if stretch.is_closed and is_same(before, [*_attributes_of(self._workload.model)]):
            self._done.append(_Done(given, before, reached, stretch))
        return loss


class _Leaf(NamedTuple):
    """The layout and known values of a tensor in a micro-batch. The tensor itself is not kept alive."""

    layout: Any
    value: Any

    def is_like(self, other: _Leaf) -> bool:
        if self.layout != other.layout or self.value is None or other.value is None:
            return False
        with _disable_current_modes():
            return bool(torch.equal(self.value, other.value) if self.layout else self.value == other.value)


class _Given(NamedTuple):
    """The inputs of a pass: its micro-batch, whether the loss is scaled, and the parameters without a gradient."""

    leaves: list[_Leaf]
    is_share: bool
    without: list[nn.Parameter]

    def is_like(self, other: _Given) -> bool:
        has_same = self.is_share == other.is_share and is_same(self.without, other.without)
        return has_same and len(self.leaves) == len(other.leaves) and all(map(_Leaf.is_like, self.leaves, other.leaves))


class _Done(NamedTuple):
    """A pass that ran: its inputs, the model's attributes before it, its events (``stretch``), and ``reached``.

    ``reached`` holds the parameters that got their first gradient in this pass.
    """

    given: _Given
    before: list[Any]
    reached: list[nn.Parameter]
    stretch: Stretch


def _known_leaf(leaf: Any) -> _Leaf:
    if not isinstance(leaf, Tensor):
        return _Leaf(None, leaf)
    return _Leaf((leaf.shape, leaf.stride(), leaf.dtype), known_of(leaf))


def _attributes_of(model: nn.Module) -> Iterator[Any]:
    """Yield a token for each attribute of the modules, and for each item of an attribute that is a collection."""
    for module in model.modules():
        for value in vars(module).values():
            yield _token(value)
            if isinstance(value, dict):
                yield from map(_token, value.values())
            elif isinstance(value, list | tuple | set):
                yield from map(_token, value)


def _token(value: Any) -> Any:
    """Return a token that identifies an object without keeping it alive."""
    if isinstance(value, dict | list | tuple | set):
        return type(value)
    try:
        return weakref.ref(value)  # the same reference as long as the object is alive
    except TypeError:
        return value
