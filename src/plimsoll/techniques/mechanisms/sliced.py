"""A module's forward in slices of rows: run without a graph, then recomputed slice by slice in backward.

The result has all rows, as in a normal call, so a loss that compares rows with each other still sees all rows. Backward
receives the gradient of the whole result. It recomputes each slice with its graph, with the random numbers and autocast
state of the first computation, and runs backward through the slice. So only one slice's activations are alive at a
time, and parameters accumulate their gradients slice by slice.

The recomputation must give the same results as the first computation. This is checked in the first backward of each
module. Torch refuses second derivatives. Hooks on parameters are refused here, because they would be called with
partial gradients. Hooks on submodules are called twice for each slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from plimsoll.errors import InputError
from plimsoll.memory.repeated import stands_for
from plimsoll.techniques.mechanisms.rng_replay import Autocast, RandomNumbers
from plimsoll.techniques.mechanisms.row_by_row import computes_rows_alone
from plimsoll.techniques.mechanisms.rows import Arguments, row_leaves, with_rows

_LIKE_THE_FIRST = {torch.float32: 1e-5, torch.float64: 1e-5}  # relative tolerance between the two computations
_LIKE_THE_FIRST_IN_HALVES = 1e-2


class Span(NamedTuple):
    """A slice of rows. ``num_passes``: the number of equal slices that it stands for, which is 1 outside dry runs."""

    start: int
    stop: int
    num_passes: int


class Slicing:
    """State shared by the sliced modules of one model.

    Attributes:
        num_rows: rows per slice.
        num_sliced: number of calls that were computed in slices.
        num_whole: number of calls that could not be sliced, although they had more rows than a slice.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.num_sliced, self.num_whole = num_rows, 0, 0
        self._is_inside = False

    @property
    def is_inside(self) -> bool:
        """True while an enclosing module is computed in slices."""
        return self._is_inside

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Disable slicing of submodules while the context is active."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before


class SlicedForward:
    """The forward of a module, computed in slices if the module computes each row independently of all others.

    It is an object, not a closure, so that a deep copy of the model calls its own modules. ``forward`` is the original.
    """

    def __init__(self, name: str, module: nn.Module, slicing: Slicing) -> None:
        functools.update_wrapper(self, module.forward)
        self.name, self.module, self.forward, self.slicing = name, module, module.forward, slicing
        self.is_checked = False
        self._gives_rows: dict[tuple[bool, bool], bool] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's forward."""
        if self.slicing.is_inside:
            return self.forward(*args, **kwargs)
        arguments = Arguments(args, kwargs)
        if arguments.num_rows is None or arguments.num_rows <= self.slicing.num_rows:
            return self.forward(*args, **kwargs)
        if not self._can_be_sliced(arguments):
            self.slicing.num_whole += 1
            return self.forward(*args, **kwargs)
        self.slicing.num_sliced += 1
        if torch.is_grad_enabled():
            _refuse_hooks(self.name, self.module)
        return _Call(self, arguments).result()

    def _can_be_sliced(self, arguments: Arguments) -> bool:
        """Return whether the module computes rows independently; checked once for training and once for evaluation."""
        mode = self.module.training, torch.is_grad_enabled()
        known = self._gives_rows.get(mode)
        if known is None:
            with self.slicing.inside(), _buffers_unchanged(self.name, self.module, by_value=True):
                known = computes_rows_alone(self.name, self.module, self.forward, arguments)
            if known is not None:
                self._gives_rows[mode] = known
        return bool(known)


class _Call:
    """One call of a sliced module, from its first computation to its backward."""

    def __init__(self, of: SlicedForward, arguments: Arguments) -> None:
        assert arguments.num_rows is not None
        self._of, self._arguments, self._num_rows = of, arguments, arguments.num_rows
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in arguments.tensors)
        self._spans = list(_spans(self._num_rows, of.slicing.num_rows, is_fake))
        self._beside = next(of.module.parameters(), torch.empty(0))  # on the device that may draw random numbers
        self._autocast = Autocast.now(self._beside.device)
        self._random: list[RandomNumbers] = []
        self._sums: list[Tensor] | None = None if is_fake or of.is_checked else []
        self._differs: list[bool] = []

    def result(self) -> Any:
        """Compute and return the result of all slices. If it needs gradients, add a node for backward to the graph."""
        given = [tensor.detach() for tensor in self._arguments.tensors]
        needs = [tensor.requires_grad for tensor in self._arguments.tensors]
        wholes: list[Tensor] = []
        with self._of.slicing.inside(), _buffers_unchanged(self._of.name, self._of.module):
            for span in self._spans:
                result, leaves = self._first(span, given, needs)
                wholes = wholes or [_room_for(leaf, self._num_rows) for leaf in leaves]
                _put(wholes, leaves, span, self._of.name)
        self._differs = [leaf.requires_grad for leaf in leaves]
        if any(self._differs):
            anchor = torch.empty(0, requires_grad=True)
            wholes = list(_Sliced.apply(self, wholes, anchor, *self._arguments.tensors))  # type: ignore[no-untyped-call]
        return with_rows(result, iter(wholes))

    def _first(self, span: Span, given: list[Tensor], needs: list[bool]) -> tuple[Any, list[Tensor]]:
        """Compute a slice with the kernels that backward will use, but save no tensors for backward.

        Returns the result of the slice, and the tensors in it.
        """
        self._random.append(RandomNumbers.now([self._beside, *given]))
        hooks = saved_tensors_hooks(lambda tensor: None, self._refuse_use)
        with hooks, stands_for(span.num_passes), self._autocast.again():
            args, kwargs = self._slice(span, _as_leaves(self._of_span(given, span), needs))
            result = self._of.forward(*args, **kwargs)
        leaves = row_leaves(result, span.stop - span.start)
        if leaves is None:
            raise InputError(
                f"gradient_cache: `{self._of.name}` does not return one entry per row for rows {span.start} to "
                f"{span.stop}, as it did for the rows before: leave gradient_cache out"
            )
        if self._sums is not None:
            self._sums += [_weighted_sums(leaf) for leaf in leaves]
        return result, leaves

    def again(self, tensors: Sequence[Tensor], arriving: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Recompute all slices and run backward through them; return the gradients of the arguments' tensors."""
        needs = [tensor.requires_grad for tensor in tensors]
        shared = _as_leaves([tensor.detach() for tensor in tensors], needs)  # used by all slices
        gradients = [
            torch.zeros_like(tensor) if needed and self._arguments.of_rows(tensor) else None
            for tensor, needed in zip(tensors, needs, strict=True)
        ]
        sums: list[Tensor] = []
        with self._of.slicing.inside(), RandomNumbers.now([self._beside, *tensors]).kept():
            for span, random in zip(self._spans, self._random, strict=True):
                random.restore()
                sums += self._backward_of(span, shared, arriving, gradients)
        self._require_the_first(sums)
        return [one.grad if gradient is None else gradient for one, gradient in zip(shared, gradients, strict=True)]

    def _backward_of(
        self, span: Span, shared: list[Tensor], arriving: Sequence[Tensor | None], gradients: list[Tensor | None]
    ) -> list[Tensor]:
        leaves = self._of_span(shared, span)
        with stands_for(span.num_passes), torch.enable_grad():
            with self._autocast.again():
                args, kwargs = self._slice(span, leaves)
                result = self._of.forward(*args, **kwargs)
            computed = row_leaves(result, span.stop - span.start) or []
            pairs = [
                (one, gradient[span.start : span.stop])
                for one, gradient in zip(computed, arriving, strict=True)
                if gradient is not None and one.requires_grad
            ]
            del result
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None and leaf.grad is not None:
                gradient[span.start : span.stop] = leaf.grad
        return [] if self._sums is None else [_weighted_sums(one) for one in computed]

    def _slice(self, span: Span, tensors: list[Tensor]) -> tuple[Any, dict[str, Any]]:
        return self._arguments.with_tensors(tensors, lambda rows: rows[span.start : span.stop])

    def _of_span(self, tensors: list[Tensor], span: Span) -> list[Tensor]:
        """Return the slice, as a new leaf, of each tensor that has rows; other tensors are returned as they are."""
        return [
            tensor.detach()[span.start : span.stop].requires_grad_(tensor.requires_grad)
            if self._arguments.of_rows(tensor)
            else tensor
            for tensor in tensors
        ]

    def _refuse_use(self, nothing: Any) -> Tensor:
        raise InputError(
            f"gradient_cache computes `{self._of.name}` a first time without its graph, but its forward runs backward "
            "itself (torch.autograd.grad, or create_graph): leave gradient_cache out"
        )

    def _require_the_first(self, sums: list[Tensor]) -> None:
        """Raise an error if the fingerprints of the second computation differ from the fingerprints of the first."""
        if not self._sums:
            return
        for first, second in zip(self._sums, sums, strict=True):
            is_half = self._autocast.is_enabled or first.dtype not in _LIKE_THE_FIRST
            bound = _LIKE_THE_FIRST_IN_HALVES if is_half else _LIKE_THE_FIRST[first.dtype]
            if bool(((first - second)[0].abs() > bound * first[1].abs()).any()):
                raise InputError(
                    f"gradient_cache computes `{self._of.name}` twice, and the second result differs: the module uses "
                    "random numbers that are not torch's (Python's, numpy's), or keeps state between calls; leave "
                    "gradient_cache out"
                )
        self._sums, self._of.is_checked = None, True


class _Sliced(torch.autograd.Function):
    """The autograd node that returns all rows of a module's results. Backward recomputes the slices."""

    @staticmethod
    def forward(ctx: Any, call: _Call, wholes: list[Tensor], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(whole for whole, differs in zip(wholes, call._differs, strict=True) if not differs)
        )
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Any, ...]:
        return (None, None, None, *ctx.call.again(ctx.saved_tensors, arriving))


def _spans(num_rows: int, num_rows_of_slice: int, is_fake: bool) -> Iterator[Span]:
    """Yield the slices. In a dry run, the second slice stands for all slices between the first and the last slice.

    The first slice is traced separately, because it creates the gradients of the parameters.
    """
    starts = range(0, num_rows, num_rows_of_slice)
    for number, start in enumerate(starts):
        num_passes = 1
        if is_fake and number == 1:
            num_passes = max(len(starts) - 2, 1)
        if not is_fake or number < 2 or number == len(starts) - 1:
            yield Span(start, min(start + num_rows_of_slice, num_rows), num_passes)


def _as_leaves(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [tensor.requires_grad_(needed) if needed else tensor for tensor, needed in zip(tensors, needs, strict=True)]


def _room_for(leaf: Tensor, num_rows: int) -> Tensor:
    with torch.no_grad():
        return leaf.new_empty((num_rows, *leaf.shape[1:]))


def _put(wholes: list[Tensor], leaves: list[Tensor], span: Span, name: str) -> None:
    for whole, leaf in zip(wholes, leaves, strict=True):
        if whole.shape[1:] != leaf.shape[1:]:
            raise InputError(
                f"gradient_cache: `{name}` returns rows of shape {list(whole.shape[1:])} for some slices and of "
                f"{list(leaf.shape[1:])} for others, which cannot be concatenated: leave gradient_cache out"
            )
        whole[span.start : span.stop] = leaf.detach()


def _weighted_sums(leaf: Tensor) -> Tensor:
    """Return a fingerprint of a slice's results: column-weighted sums of the values and of their absolute values."""
    with torch.no_grad(), torch.autocast(leaf.device.type, enabled=False):
        columns = (leaf.detach() if leaf.is_floating_point() else leaf.detach().float()).flatten(1)
        weights = torch.linspace(-1, 1, columns.shape[1], dtype=columns.dtype, device=leaf.device)
        return torch.stack((columns @ weights, columns.abs() @ weights.abs())).nan_to_num()


@contextmanager
def _buffers_unchanged(name: str, module: nn.Module, by_value: bool = False) -> Iterator[None]:
    """Raise an error if a module writes to its buffers in the block, because it would do so twice for each slice.

    Version counters detect writes, except through ``.data``. These are detected only with ``by_value``.
    """
    before = {key: (buffer, buffer._version) for key, buffer in module.named_buffers()}
    values = {key: buffer.clone() for key, (buffer, _) in before.items()} if by_value else {}
    yield
    for key, buffer in module.named_buffers():
        old, version = before.get(key, (None, 0))
        if old is not buffer or buffer._version != version or not _is_same(values.get(key, buffer), buffer):
            raise InputError(
                f"gradient_cache: the forward of `{name}` changes its buffer {key}, and would do so for each slice, "
                "twice: leave gradient_cache out"
            )


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one is other or isinstance(other, FakeTensor):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _refuse_hooks(name: str, module: nn.Module) -> None:
    for parameter in module.parameters():
        after = (parameter._post_accumulate_grad_hooks or {}).values()
        if parameter._backward_hooks or not all(map(_takes_parts, after)):
            raise InputError(
                f"gradient_cache: a parameter of `{name}`, of shape {list(parameter.shape)}, has a hook on its "
                "gradient, which would be called with a partial gradient after each slice: remove the hook, or leave "
                "gradient_cache out"
            )


def _takes_parts(hook: Callable[..., Any]) -> bool:
    """Return whether a hook may be called with partial gradients, as Plimsoll's hooks are called in micro-batches."""
    return str(getattr(hook, "__module__", "")).startswith("plimsoll.")
