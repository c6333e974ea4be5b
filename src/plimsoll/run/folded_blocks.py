"""Blocks of a dry run's pass that are alike: the first and the last of a row are run, and the others are noted as these.

A transformer does the same in each of its layers. Of a row of layers that are alike the first is run, the second to the
last but one are noted as the first was, and the last is run. In backward the last is run, the others are noted as it
was, and the first is run. Both that were run must have done the same, event by event. Where they have not, or where a
block is called in another way than the first, `BlocksDiffer` is raised: the training has to be rehearsed with all
blocks run.

Alike are blocks whose modules have the same classes, settings and shapes, but for the number of the block. They take
one tensor that has a gradient and return one; everything else that they are given is the same for all.

Does NOT see code that does something else in a block in the middle, by its number alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from plimsoll.errors import PlimsollError
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.repeated import Place, Renamed, Stretch, end_alike, ended_since, place_of, row_of
from plimsoll.techniques._blocks import blocks_of
from plimsoll.techniques._forwards import replaced_forward

_FEWEST = 3  # in a row, of which the first and the last are run
_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.Size)


class BlocksDiffer(PlimsollError):
    """Blocks that looked alike have not done the same."""


class FoldedBlocks:
    """The rows of blocks of one model that are alike.

    Args:
        recorder: what records the dry run.
        model: the model.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder, self._model = recorder, model

    @contextmanager
    def folded(self) -> Iterator[None]:
        """Fold the rows in the forward and the backward pass of the block; techniques are installed."""
        with ExitStack() as stack:
            for blocks in rows_of(self._model):
                row = _Row(self._recorder, blocks)
                for number, block in enumerate(blocks):
                    stack.enter_context(replaced_forward(block, _Forward(row, number, block.forward)))
            yield


def rows_of(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Return blocks of a model that follow one another, are alike and share no parameter, at least three together."""
    waiting = [(name.rpartition("."), block) for name, block in blocks_of(model)]
    while waiting:
        (path, _, number), first = waiting[0]
        row = [first]
        for (other_path, _, other_number), block in waiting[1:] if number.isdecimal() else ():
            is_next = other_path == path and other_number == str(int(number) + len(row))
            if not is_next or not are_alike(first, int(number), block, int(other_number)):
                break
            row.append(block)
        waiting = waiting[len(row) :]
        parameters = [one for block in row for one in block.parameters()]
        if len(row) >= _FEWEST and len(parameters) == len(set(parameters)):
            yield row


def are_alike(first: nn.Module, first_number: int, other: nn.Module, other_number: int) -> bool:
    """Whether all that decides what two blocks do is the same, but for the number of each."""
    pairs, others = [*_traits(first)], [*_traits(other)]
    return len(pairs) == len(others) and all(
        one == another or (one[:-1] == another[:-1] and one[-2:] == (int, first_number) and another[-1] == other_number)
        for one, another in zip(pairs, others, strict=True)
    )


def _traits(block: nn.Module) -> Iterator[tuple[Any, ...]]:
    """What decides what a block does: each trait with its name, and its value last."""
    for name, module in block.named_modules():
        yield name, type(module)
        for key, value in vars(module).items():
            if key in _PARTS:
                continue
            if isinstance(value, dict | list | tuple | set):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield name, key, type(value), tuple((place, _identity(one)) for place, one in items)
            else:
                is_ours = key == "forward" and type(value).__module__.startswith("plimsoll.")
                yield name, key, type(value), None if is_ours else _identity(value)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield name, key, None if tensor is None else _layout(tensor)


def _identity(value: Any) -> Hashable:
    if type(value) is partial:
        return partial, id(value.func), *map(_identity, (*value.args, *value.keywords, *value.keywords.values()))
    return value if isinstance(value, _PLAIN) else ("object", id(value))


def _layout(tensor: Tensor) -> Hashable:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


class _Forward:
    """The forward of one block of a row while its pass is folded."""

    def __init__(self, row: _Row, number: int, forward: Callable[..., Any]) -> None:
        self._row, self._number, self._forward = row, number, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return self._row.call(self._number, lambda: self._forward(*args, **kwargs), _Given.of((args, kwargs)))


class _Given(NamedTuple):
    """What a block is given: the tensor that has a gradient, or ``None`` if there is not one, and all else."""

    tensor: Tensor | None
    others: list[Any]
    structure: Any

    @classmethod
    def of(cls, arguments: Any) -> _Given:
        leaves, structure = tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        tensor = tensors[0] if len(tensors) == 1 and tensors[0].grad_fn is not None else None
        return cls(tensor, [None if leaf is tensor else leaf for leaf in leaves], structure)

    def is_like(self, layout: Hashable, other: _Given) -> bool:
        """Whether the tensor has a layout, and all else is the same."""
        return (
            self.tensor is not None
            and _layout(self.tensor) == layout
            and self.structure == other.structure
            and all(
                one is another or (isinstance(one, _PLAIN) and one == another)
                for one, another in zip(self.others, other.others, strict=True)
            )
        )


class _Result(NamedTuple):
    """What a block returns: one tensor that has a gradient, and all else."""

    others: list[Any]
    place: int
    structure: Any

    def with_tensor(self, tensor: Tensor) -> Any:
        return tree_unflatten([*self.others[: self.place], tensor, *self.others[self.place + 1 :]], self.structure)


class _Passed(NamedTuple):
    """The forward pass of a block that was run."""

    stretch: Stretch
    begin: Place
    input_row: int
    keeps_input: bool
    result: _Result

    def compared(self, renamed: Renamed) -> Any:
        """Return what is the same for a block that does the same."""
        return self.stretch.compared({}, renamed), self.keeps_input, self.result


class _Row:
    """One forward and backward pass over a row of blocks."""

    def __init__(self, recorder: Recorder, blocks: Sequence[nn.Module]) -> None:
        self.recorder, self.blocks = recorder, blocks
        self.names = [recorder._names[block] for block in blocks]
        self.noted: list[_Noted] = []
        self.backward: _Backward | None = None  # of the last block
        self._num_called = 0
        self._given: _Given | None = None  # to the first, until the last is called
        self._layout: Hashable = None
        self._passed: _Passed | None = None  # the forward pass of the first

    def call(self, number: int, run: Callable[[], Any], given: _Given) -> Any:
        """Run a block, or note it as the first was."""
        if number == 0:
            return self._call_first(run, given)
        if self._passed is None:
            return run()
        self._num_called += 1
        if number != self._num_called or self._given is None or not given.is_like(self._layout, self._given):
            raise BlocksDiffer(f"{self.names[number]} is called in another way than {self.names[0]}")
        if number < len(self.blocks) - 1:
            return self._note(number, given, self._passed)
        self._given = None
        result, passed = self._run(number, run, given)
        if passed is None or passed.compared(self.renamed(number, 0)) != self._passed.compared(_as_it_is):
            raise BlocksDiffer(f"{self.names[number]} does not do what {self.names[0]} does")
        return result

    def _call_first(self, run: Callable[[], Any], given: _Given) -> Any:
        if self._num_called or self._passed is not None:
            raise BlocksDiffer(f"{self.names[0]} is called twice")
        result, self._passed = self._run(0, run, given)
        if self._passed is not None and given.tensor is not None:
            self._given, self._layout = given._replace(tensor=None), _layout(given.tensor)
        return result

    def _run(self, number: int, run: Callable[[], Any], given: _Given) -> tuple[Any, _Passed | None]:
        """Run a block, and look at its backward pass, too; ``None``: its like cannot be noted."""
        begin, tensor = place_of(self.recorder), given.tensor
        held = None if tensor is None else _references(tensor)
        result = run()
        leaves, structure = tree_flatten(result)
        made = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if tensor is None or len(made) != 1 or not leaves[made[0]].requires_grad:
            return result, None
        output = leaves[made[0]]
        stretch = Stretch(self.recorder, begin, [output])
        input_row, is_new = row_of(self.recorder, tensor), row_of(self.recorder, output) >= begin.storage
        if not is_new or input_row < 0 or not stretch.is_plain or ended_since(self.recorder, begin):
            return result, None
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        passed = _Passed(
            stretch, begin, input_row, _references(tensor) != held, _Result(others, made[0], structure)
        )  # fmt: skip
        backward = _Backward(self, number, passed)
        _call_before(output, backward.begin)
        _call_before(tensor, backward.end)
        return result, passed

    def _note(self, number: int, given: _Given, example: _Passed) -> Any:
        noted = _Noted(self, number, example, given.tensor)
        self.noted.append(noted)
        with self.recorder._graphs.unseen():
            tensor = _NotedBlock.apply(given.tensor, noted)  # type: ignore[no-untyped-call]
        return example.result.with_tensor(tensor)

    def renamed(self, number: int, other: int) -> Renamed:
        """Return what stands in place of a text where the block is another."""
        texts = [*self.recorder._texts]
        name = re.compile(rf"(?<![\w.]){re.escape(self.names[number])}(?!\w)")

        def renamed(text: int) -> int:
            if text not in known:
                known[text] = self.recorder.text(name.sub(self.names[other], texts[text]))
            return known[text]

        known: dict[int, int] = {}
        return renamed


def _as_it_is(text: int) -> int:
    return text


def _references(tensor: Tensor) -> tuple[int, int, int]:
    """Who holds a tensor or its storage, in numbers that rise where it is kept for backward."""
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor)  # type: ignore[attr-defined]


def _call_before(tensor: Tensor, function: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient of a tensor once that is complete."""
    number = tensor.output_nr
    assert tensor.grad_fn is not None
    tensor.grad_fn.register_prehook(lambda gradients: function(gradients[number]))


class _Backward:
    """The backward pass of a block that is run, from its result's gradient to that of its input."""

    def __init__(self, row: _Row, number: int, passed: _Passed) -> None:
        self._row, self._number, self._passed = row, number, passed
        self._parameters = [*row.blocks[number].parameters()]
        self._begin: Place | None = None
        self._given_row, self._given_layout, self._before = -1, None, []

    def begin(self, gradient: Tensor) -> None:
        """Note where it begins."""
        if self._number:  # the last, whose backward pass is the first of its row
            self._end_twins()
        recorder = self._row.recorder
        self._begin = place_of(recorder)
        self._given_row, self._given_layout = row_of(recorder, gradient), _layout(gradient)
        self._before = [_row_of_gradient(recorder, one) for one in self._parameters]

    def _end_twins(self) -> None:
        """What forward has left of a block and is gone before its backward pass, as casts are, is gone of all."""
        begin = self._passed.begin.storage
        twins = {
            row: [noted.begin_row + row - begin for noted in self._row.noted] for row in self._passed.stretch.left
        }  # fmt: skip
        end_alike(self._row.recorder, self._passed.stretch.end, twins)

    def end(self, gradient: Tensor) -> None:
        """Let those that are noted be as this was, or compare it with the last of the row."""
        recorder, begin = self._row.recorder, self._begin
        if begin is None:
            raise BlocksDiffer(f"the backward pass of {self._row.names[self._number]} has not begun")
        rows = [_row_of_gradient(recorder, one) for one in self._parameters]
        reached = [place for place, row in enumerate(rows) if row != self._before[place]]
        is_new = row_of(recorder, gradient) != self._given_row
        gradients = [self._parameters[place].grad for place in reached]
        made = [*([gradient] if is_new else []), *(one for one in gradients if one is not None)]
        ended = ended_since(recorder, begin)
        self.stretch = Stretch(recorder, begin, made, ended)
        self.reached, self.is_new = reached, is_new
        names = self._older()
        self.ended = [names[row] for row in ended if row in names]
        # Of the first of a row that is the last to use them, what all blocks were given may end, too.
        is_whole = self.stretch.is_plain and not self.stretch.left and len(self.ended) == len(ended) or not self._number
        keeps_input = "input" in self.ended
        if not is_whole or keeps_input != self._passed.keeps_input or (not is_new and _layout(gradient) != self._given_layout):
            raise BlocksDiffer(f"the backward pass of {self._row.names[self._number]} leaves more than gradients")
        last = self._row.backward
        if self._number:
            self._row.backward = self
        elif last is None or last.compared(self._row.renamed(len(self._row.blocks) - 1, 0)) != self.compared(_as_it_is):
            raise BlocksDiffer(f"the backward pass of {self._row.names[0]} is another than that of the last of its row")

    def _older(self) -> dict[int, Hashable]:
        """What storages are that were there before."""
        passed, begin = self._passed, self._passed.begin.storage
        names: dict[int, Hashable] = {row: ("of the gradient", place) for place, row in enumerate(self._before)}
        names |= {row: ("saved", row - begin) for row in passed.stretch.left}
        return names | {passed.input_row: "input", self._given_row: "gradient"}

    def compared(self, renamed: Renamed) -> Any:
        """Return what is the same for a block that does the same."""
        return self.stretch.compared(self._older(), renamed), self.reached, self.is_new


def _row_of_gradient(recorder: Recorder, parameter: nn.Parameter) -> int:
    return -1 if parameter.grad is None else row_of(recorder, parameter.grad)


class _Noted:
    """A block that is noted as others of its row were.

    Attributes:
        begin_row: of the storages of its forward pass.
    """

    def __init__(self, row: _Row, number: int, example: _Passed, given: Tensor | None) -> None:
        assert given is not None
        self._row, self._number, self._example = row, number, example
        self._input_row = row_of(row.recorder, given)
        self._kept = given.untyped_storage() if example.keeps_input else None
        self.begin_row = place_of(row.recorder).storage

    def forward(self) -> Tensor:
        """Note its forward pass; returns its result."""
        (result,) = self._example.stretch.again(renamed=self._row.renamed(0, self._number))
        return result

    def backward(self, gradient: Tensor) -> Tensor:
        """Note its backward pass; returns the gradient of its input."""
        row, example = self._row, self._row.backward
        if example is None:
            raise BlocksDiffer(f"the backward pass of {row.names[self._number]} comes before that of the last block")
        parameters = [*row.blocks[self._number].parameters()]
        rows: dict[Hashable, int] = {"input": self._input_row, "gradient": row_of(row.recorder, gradient)}
        rows |= {
            ("of the gradient", place): _row_of_gradient(row.recorder, one) for place, one in enumerate(parameters)
        }  # fmt: skip
        ended = [self.begin_row + name[1] if _is_saved(name) else rows[name] for name in example.ended]
        made = iter(example.stretch.again(ended, row.renamed(len(row.blocks) - 1, self._number)))
        self._kept = None
        result = next(made) if example.is_new else gradient
        for place in example.reached:
            parameters[place].grad = next(made)
        return result


def _is_saved(name: Any) -> bool:
    return isinstance(name, tuple) and name[0] == "saved"


class _NotedBlock(torch.autograd.Function):
    """Stands in the graph for a block that is noted."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, noted: _Noted) -> Tensor:
        """Note the forward pass."""
        ctx.noted = noted
        return noted.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Note the backward pass."""
        return ctx.noted.backward(*gradients), None
