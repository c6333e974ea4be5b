"""Folding of alike blocks in a pass of a dry run: only the first and the last block of a row run.

A transformer performs the same operations in each of its layers. In a row of alike layers
(`plimsoll.step.folding.alike`), only the first and the last layer run. The events of the layers between them are copied
in the trace: in forward from the first layer, in backward from the last.

The conditions are:

- A block takes one tensor with a gradient and returns one. Its other arguments are the same for all blocks.
- Between the first and the last block, no other code uses these tensors or the blocks' parameters.
- The first and the last block recorded the same events.

If a condition fails, `BlocksDiffer` is raised, and the dry run starts again and runs all blocks. Does not detect code
that treats a block in the middle differently because of its number.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from plimsoll.errors import PlimsollError
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.repeated import Place, Renamed, Stretch, end_alike, ended_since, name_gradients, place_of, row_of
from plimsoll.step.folding.alike import PLAIN, layout_of, rows_of
from plimsoll.techniques.mechanisms.forwards import replaced_forward

_ONLY_KEPT = 1  # references to a storage that no other code holds


class BlocksDiffer(PlimsollError):
    """Raised if blocks that looked alike behave differently."""


class FoldedBlocks:
    """The rows of consecutive alike blocks of one model.

    Args:
        recorder: the recorder of the dry run.
        model: the model.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder, self._model = recorder, model

    @contextmanager
    def folded(self) -> Iterator[None]:
        """Fold the rows in one forward and backward pass inside the block. Techniques must be installed before."""
        with ExitStack() as stack:
            for blocks in rows_of(self._model):
                row = _Row(self._recorder, blocks)
                for number, block in enumerate(blocks):
                    stack.enter_context(replaced_forward(block, _Forward(row, number, block.forward)))
            yield


class _Forward:
    """The replacement of a block's ``forward`` method while the row of the block is folded."""

    def __init__(self, row: _Row, number: int, forward: Callable[..., Any]) -> None:
        self._row, self._number, self._forward = row, number, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return self._row.call(self._number, lambda: self._forward(*args, **kwargs), _Given.of((args, kwargs)))


class _Given(NamedTuple):
    """The arguments of a block: the tensor that requires a gradient, and all other arguments.

    The tensor is ``None`` if there is not exactly one, or if it is a leaf.
    """

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
        """Return whether the tensor has this layout, and the other arguments are the same."""
        return (
            self.tensor is not None
            and layout_of(self.tensor) == layout
            and self.structure == other.structure
            and all(
                one is another or (isinstance(one, PLAIN) and one == another)
                for one, another in zip(self.others, other.others, strict=True)
            )
        )


class _Result(NamedTuple):
    """The values that a block returned, except the tensor that requires a gradient, whose position is ``place``."""

    others: list[Any]
    place: int
    structure: Any

    def with_tensor(self, tensor: Tensor) -> Any:
        return tree_unflatten([*self.others[: self.place], tensor, *self.others[self.place + 1 :]], self.structure)


class _Passed(NamedTuple):
    """The forward pass of a block that ran: its events, its result, and the row of its input in the record.

    ``keeps_input`` is true if autograd saves the input for backward.
    """

    stretch: Stretch
    begin: Place
    input_row: int
    keeps_input: bool
    result: _Result

    def compared(self, renamed: Renamed) -> Any:
        """Return a key that is equal for two passes that recorded the same events."""
        return self.stretch.compared({}, renamed), self.keeps_input, self.result


class _Row:
    """One forward and backward pass over a row of consecutive alike blocks.

    Attributes:
        recorder: the recorder of the dry run.
        blocks: the blocks.
        names: the names of the blocks in the record of the dry run.
        noted: the blocks that do not run, for which events are copied, in forward order.
        last: the backward pass of the last block; ``None`` before it has run.
    """

    def __init__(self, recorder: Recorder, blocks: Sequence[nn.Module]) -> None:
        self.recorder, self.blocks = recorder, blocks
        self.names = [recorder._names[block] for block in blocks]
        self.noted: list[_Noted] = []
        self.last: _Backward | None = None
        self._num_called = 0
        self._first: _Passed | None = None
        self._given: _Given | None = None  # arguments of the first block except its tensor, until the last block runs
        self._layout: Hashable = None  # layout of that tensor

    def call(self, number: int, run: Callable[[], Any], given: _Given) -> Any:
        """Run a block, or repeat the events of the first block."""
        if number == 0:
            return self._call_first(run, given)
        if self._first is None:
            return run()
        self._num_called += 1
        if number != self._num_called or self._given is None or not given.is_like(self._layout, self._given):
            raise BlocksDiffer(f"{self.names[number]} is called differently from {self.names[0]}")
        if number < len(self.blocks) - 1:
            return self._note(number, given, self._first)
        self._given = None
        result, last = self._run(number, run, given)
        if last is None or last.compared(self.renamed(number, 0)) != self._first.compared(_as_it_is):
            raise BlocksDiffer(f"{self.names[number]} behaves differently from {self.names[0]}")
        return result

    def _call_first(self, run: Callable[[], Any], given: _Given) -> Any:
        if self._first is not None:
            raise BlocksDiffer(f"{self.names[0]} is called twice")
        result, self._first = self._run(0, run, given)
        if given.tensor is not None:
            self._given, self._layout = given._replace(tensor=None), layout_of(given.tensor)
        return result

    def _run(self, number: int, run: Callable[[], Any], given: _Given) -> tuple[Any, _Passed | None]:
        """Run a block and observe its backward pass. Return ``None`` as the pass if it cannot be repeated."""
        begin, tensor = place_of(self.recorder), given.tensor
        references = None if tensor is None else _references_to(tensor)
        result = run()
        leaves, structure = tree_flatten(result)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if tensor is None or len(places) != 1 or not leaves[places[0]].requires_grad:
            return result, None
        made, input_row = leaves[places[0]], row_of(self.recorder, tensor)
        stretch = Stretch(self.recorder, begin, [made])
        is_new = row_of(self.recorder, made) >= begin.storage
        if not is_new or input_row < 0 or not stretch.is_plain or ended_since(self.recorder, begin):
            return result, None
        others = [None if leaf is made else leaf for leaf in leaves]
        keeps_input = _references_to(tensor) != references
        passed = _Passed(stretch, begin, input_row, keeps_input, _Result(others, places[0], structure))
        backward = _Backward(self, number, passed)
        _call_before(made, backward.begin)
        _call_before(tensor, backward.end)
        return result, passed

    def _note(self, number: int, given: _Given, example: _Passed) -> Any:
        assert given.tensor is not None
        noted = _Noted(self, number, example, given.tensor)
        self.noted.append(noted)
        _call_before(given.tensor, noted.require_own)
        with self.recorder._graphs.unseen():
            tensor = _NotedBlock.apply(given.tensor, noted)  # type: ignore[no-untyped-call]
        return example.result.with_tensor(tensor)

    def renamed(self, number: int, other: int) -> Renamed:
        """Return a function that replaces the name of block ``number`` by the name of ``other`` in a recorded text.

        The function takes and returns the numbers by which the recorder identifies texts.
        """
        texts, known = [*self.recorder._texts], dict[int, int]()
        name = re.compile(rf"(?<![\w.]){re.escape(self.names[number])}(?!\w)")

        def renamed(text: int) -> int:
            if text not in known:
                known[text] = self.recorder.text(name.sub(self.names[other], texts[text]))
            return known[text]

        return renamed


def _as_it_is(text: int) -> int:
    return text


def _references_to(tensor: Tensor) -> tuple[int, int, int]:
    """Count the references to a tensor and its storage. The counts rise if autograd saves the tensor for backward."""
    storage = tensor.untyped_storage()
    num_references = tensor._use_count()  # type: ignore[attr-defined]
    return num_references, torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor)


def _call_before(tensor: Tensor, function: Callable[[Tensor], None]) -> None:
    """Register a function that is called with the gradient of a tensor once this gradient is complete."""
    number = tensor.output_nr
    assert tensor.grad_fn is not None
    tensor.grad_fn.register_prehook(lambda gradients: function(gradients[number]))


class _Backward:
    """The backward pass of a block that runs, from the gradient of its result to the gradient of its input.

    Attributes:
        stretch: the recorded events.
        ended: roles (see `_older`) of the storages from before this pass that were freed in it.
        reached: positions of the parameters that got their first gradient in this pass.
        is_new: whether the input's gradient has its own storage; otherwise it shares the storage of the result's
            gradient.
    """

    stretch: Stretch
    ended: list[Hashable]
    reached: list[int]
    is_new: bool

    def __init__(self, row: _Row, number: int, passed: _Passed) -> None:
        self._row, self._number, self._passed = row, number, passed
        self._parameters = [*row.blocks[number].parameters()]
        self._begin: Place | None = None
        self._given: tuple[int, Hashable] = -1, None  # the row and the layout of the result's gradient
        self._before: list[int] = []  # the rows of the existing gradients

    def begin(self, gradient: Tensor) -> None:
        """Record the start of the backward pass."""
        recorder = self._row.recorder
        if self._number:  # the last block of its row, whose backward pass runs first
            self._end_twins()
        self._begin = place_of(recorder)
        self._given = row_of(recorder, gradient), layout_of(gradient)
        self._before = [_row_of_gradient(recorder, one) for one in self._parameters]

    def _end_twins(self) -> None:
        """Repeat, for the blocks that do not run, the frees between the last block's forward and backward pass.

        The freed storages are, for example, casts that autograd does not save.
        """
        stretch, begin = self._passed.stretch, self._passed.begin.storage
        twins = {row: [noted.begin_row + row - begin for noted in self._row.noted] for row in stretch.left}
        end_alike(self._row.recorder, stretch.end, twins)

    def end(self, gradient: Tensor) -> None:
        """Record the end of the backward pass.

        The pass of the last block becomes the example for the blocks that do not run. The pass of the first block must
        have the same events.
        """
        recorder, begin, row = self._row.recorder, self._begin, self._row
        if begin is None:
            raise BlocksDiffer(f"the backward pass of {row.names[self._number]} has not begun")
        if not self._is_alone(begin):
            raise BlocksDiffer(f"the backward pass of {row.names[self._number]} is interleaved with other modules")
        rows = [_row_of_gradient(recorder, one) for one in self._parameters]
        self.reached = [place for place, now in enumerate(rows) if now != self._before[place]]
        self.is_new = row_of(recorder, gradient) != self._given[0]
        gradients = [self._parameters[place].grad for place in self.reached]
        made = [*([gradient] if self.is_new else []), *(one for one in gradients if one is not None)]
        ended, names = ended_since(recorder, begin), self._older()
        self.stretch = Stretch(recorder, begin, made, ended)
        self.ended = [names[one] for one in ended if one in names]
        is_alike = self.is_new or layout_of(gradient) == self._given[1]
        if self._number == 0:  # arguments that all blocks share may be freed here, too
            if row.last is None or row.last.compared(row.renamed(len(row.blocks) - 1, 0)) != self.compared(_as_it_is):
                raise BlocksDiffer(f"{row.names[0]} behaves differently from {row.names[-1]} in backward")
        elif not is_alike or not self.stretch.is_plain or self.stretch.left or len(self.ended) != len(ended):
            raise BlocksDiffer(f"the backward pass of {row.names[-1]} leaves more than gradients")
        elif self._passed.keeps_input != ("input" in self.ended):
            raise BlocksDiffer(f"the input of {row.names[-1]} is not freed in its backward pass")
        else:
            row.last = self

    def _is_alone(self, begin: Place) -> bool:
        """Return whether no operation since ``begin`` belongs to a module outside the block.

        Some operations, such as sums of gradients, belong to no module.
        """
        recorder, name = self._row.recorder, self._row.names[self._number]
        texts = [*recorder._texts]
        modules = {texts[number] for number in recorder._ops[1][begin.op :]}
        return all(module in {"", name} or module.startswith(f"{name}.") for module in modules)

    @property
    def had_none(self) -> list[bool]:
        """A list with True for each parameter of the block that had no gradient before this pass."""
        return [row < 0 for row in self._before]

    def _older(self) -> dict[int, Hashable]:
        """Return the role of each storage that existed before this pass, by the row of the storage in the record."""
        begin = self._passed.begin.storage
        names: dict[int, Hashable] = {row: ("gradient", place) for place, row in enumerate(self._before)}
        names |= {row: ("saved", row - begin) for row in self._passed.stretch.left}
        return names | {self._passed.input_row: "input", self._given[0]: "given"}

    def compared(self, renamed: Renamed) -> Any:
        """Return a key that is equal for two passes that recorded the same events."""
        return self.stretch.compared(self._older(), renamed), self.reached, self.is_new


def _row_of_gradient(recorder: Recorder, parameter: nn.Parameter) -> int:
    return -1 if parameter.grad is None else row_of(recorder, parameter.grad)


class _Noted:
    """A block that does not run: the events of another block of its row are repeated.

    Attributes:
        begin_row: the row, in the record, of the first storage of the block's forward pass.
    """

    def __init__(self, row: _Row, number: int, example: _Passed, given: Tensor) -> None:
        self._row, self._number, self._example = row, number, example
        self._input_row = row_of(row.recorder, given)
        self._kept = given.untyped_storage() if example.keeps_input else None
        self._returned: tuple[int, Place] | None = None  # the row of the input's gradient, and its place in the record
        self.begin_row = place_of(row.recorder).storage

    def forward(self) -> Tensor:
        """Repeat the forward pass and return its result."""
        (result,) = self._example.stretch.again(renamed=self._row.renamed(0, self._number))
        return result

    def require_own(self, gradient: Tensor) -> None:
        """Refuse a gradient of the input to which other code has added.

        Raises:
            BlocksDiffer: if the input of the block is used elsewhere.
        """
        if (row_of(self._row.recorder, gradient), place_of(self._row.recorder)) != self._returned:
            raise BlocksDiffer(f"the input of {self._row.names[self._number]} is also used elsewhere")

    def backward(self, given: Tensor) -> Tensor:
        """Repeat the backward pass, from the gradient of the result, and return the gradient of the input.

        Raises:
            BlocksDiffer: if the events of the last block's backward pass would be wrong for this block.
        """
        row, example = self._row, self._row.last
        if example is None:
            raise BlocksDiffer(f"the backward pass of {row.names[self._number]} runs before {row.names[-1]}")
        parameters = [*row.blocks[self._number].parameters()]
        if [one.grad is None for one in parameters] != example.had_none:
            raise BlocksDiffer(f"parameters of {row.names[self._number]} are also used elsewhere")
        if self._kept is not None and torch._C._storage_Use_Count(self._kept._cdata) != _ONLY_KEPT:
            raise BlocksDiffer(f"the input of {row.names[self._number]} is also kept elsewhere")
        rows: dict[Hashable, int] = {"input": self._input_row, "given": row_of(row.recorder, given)}
        rows |= {("gradient", place): _row_of_gradient(row.recorder, one) for place, one in enumerate(parameters)}
        begin = self._example.begin.storage
        rows |= {("saved", one - begin): self.begin_row + one - begin for one in self._example.stretch.left}
        ended = [rows[name] for name in example.ended]
        made = iter(example.stretch.again(ended, row.renamed(len(row.blocks) - 1, self._number)))
        self._kept = None
        gradient = next(made) if example.is_new else given
        for place in example.reached:
            parameters[place].grad = next(made)
        if not example.reached:  # all gradients existed, and the pass adds to them
            name_gradients(row.recorder, parameters)
        self._returned = row_of(row.recorder, gradient), place_of(row.recorder)
        return gradient


class _NotedBlock(torch.autograd.Function):
    """The autograd node of a block that does not run."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, noted: _Noted) -> Tensor:
        """Repeat the forward pass."""
        ctx.noted = noted
        return noted.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Repeat the backward pass."""
        return ctx.noted.backward(*gradients), None
