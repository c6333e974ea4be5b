"""A check that a module computes each row independently of the others, in values and gradients.

A few different rows are computed together, and in two parts of unequal size. The results must agree up to rounding. So
must the gradients of the module's smallest weights, computed for the first two rows. Gradients are compared because a
term that is added and subtracted (``mean - mean.detach()``) changes no result but a gradient.

Random numbers are replaced by constants: dropout keeps all elements, and the states of generators do not change.
Modules with float32 parameters compute in full float32 (no autocast, no TF32); relative differences from 1e-4 on are
then detected. For modules that compute in half precision themselves, the tolerance is 8 times the rounding of their
dtype.

Not detected: dependencies between certain rows only (the 5th and the 9th), or only from some number of rows on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.errors import InputError
from plimsoll.techniques.mechanisms.rng_replay import RandomNumbers
from plimsoll.techniques.mechanisms.rows import Arguments, row_leaves, single_values

_MOST_ROWS = 4
_MOST_TRIED = 64  # rows that are searched for rows that differ
_MOST_WEIGHTS = 1 << 20  # elements whose gradients are compared
_ROUNDINGS = {torch.float32: 256.0, torch.float64: 256.0}  # tolerance, in units of the dtype's rounding
_ROUNDINGS_OF_HALVES = 8.0
_SHARE_OF_GRADIENTS = 4.0  # gradients are sums over rows and tokens, which round more
_LEAST_SHARE = 1e-3  # of the norm of all tensors together: the smallest reference for a relative difference
_SMALLEST_NORM = 1e-30

Forward = Callable[..., Any]


def computes_rows_alone(name: str, module: nn.Module, forward: Forward, arguments: Arguments) -> bool | None:
    """Return whether each row of a module's results depends only on the same row of its arguments.

    Args:
        name: the module's name, for messages.
        module: the module with the parameters.
        forward: the function that computes the module's results.
        arguments: the arguments of a call with at least two rows.

    Returns:
        ``True`` if it does; ``False`` if the result does not have one entry per row, such as a loss or a similarity
        matrix; ``None`` if all rows are equal, so that the question cannot be decided.

    Raises:
        InputError: if a row's result depends on the rows computed with it.
    """
    is_real = not any(isinstance(tensor, FakeTensor) for tensor in arguments.tensors)
    rows = _different_rows(arguments) if is_real else list(range(min(arguments.num_rows or 0, _MOST_ROWS)))
    if len(rows) < 2:
        return None
    with _constants_for_random_numbers(module, arguments) as constants, _explained(name, len(rows), arguments):
        with torch.no_grad():
            values = _both_ways(forward, arguments, rows)
        if values is None:
            return False
        weights = _smallest_weights(module) if torch.is_grad_enabled() else []
        gradients = _gradients(forward, arguments, rows[:2], weights)
    if is_real:
        bound = constants.bound
        _require_same(name, len(rows), "output", values, bound)
        _require_same(name, 2, "gradient", gradients, bound * _SHARE_OF_GRADIENTS)
    return True


Both = tuple[list[Tensor], list[Tensor]]


def _both_ways(forward: Forward, arguments: Arguments, rows: Sequence[int]) -> Both | None:
    """Return the results of rows computed together, and of the same rows computed in two parts.

    ``None``: the results do not have one entry per row.
    """
    together = _computed(forward, arguments, rows)
    parts = [_computed(forward, arguments, part) for part in (rows[:1], rows[1:])]
    if together is None or None in parts:
        return None
    singles, whole = together
    first, others = (part[1] for part in parts if part is not None)
    fits = [part is not None and part[0] == singles and len(part[1]) == len(whole) for part in parts]
    shapes = [{one.shape[1:] for one in same} for same in zip(whole, first, others, strict=False)]
    if not all(fits) or any(len(different) > 1 for different in shapes):
        return None
    return whole, [torch.cat(both) for both in zip(first, others, strict=True)]


def _computed(forward: Forward, arguments: Arguments, rows: Sequence[int]) -> tuple[list[Any], list[Tensor]] | None:
    args, kwargs = arguments.picked(rows)
    result = forward(*args, **kwargs)
    leaves = row_leaves(result, len(rows))
    return None if leaves is None else (single_values(result), leaves)


def _gradients(forward: Forward, arguments: Arguments, rows: Sequence[int], weights: list[Tensor]) -> Both:
    """Return the gradients of weights for two rows run together, and the sums of the gradients of two separate runs."""
    if not weights:
        return [], []

    def by(numbers: Sequence[int], first: int) -> list[Tensor]:
        computed = _computed(forward, arguments, numbers)
        assert computed is not None, "these rows had values before"
        roots = [leaf for leaf in computed[1] if leaf.requires_grad]
        if not roots:
            return [torch.zeros_like(weight) for weight in weights]
        given = [_direction(root, first) for root in roots]
        return list(torch.autograd.grad(roots, weights, given, allow_unused=True, materialize_grads=True))

    with torch.enable_grad():
        together, apart = by(rows, 0), [by([row], number) for number, row in enumerate(rows)]
    return together, [one + other for one, other in zip(*apart, strict=True)]


def _direction(root: Tensor, first: int) -> Tensor:
    """Return an artificial incoming gradient for a result, different for each element.

    ``first``: the number of the first row of the result.
    """
    num_columns = root[0].numel()
    numbers = torch.arange(first * num_columns, first * num_columns + root.numel(), device=root.device)
    return torch.cos(numbers.float()).to(root.dtype).view(root.shape)


def _smallest_weights(module: nn.Module) -> list[Tensor]:
    """Return the smallest trained parameters that together have at most `_MOST_WEIGHTS` elements."""
    trained = sorted((one for one in module.parameters() if one.requires_grad), key=lambda one: one.numel())
    chosen, num_left = list[Tensor](), _MOST_WEIGHTS
    for parameter in trained:
        num_left -= parameter.numel()
        if num_left >= 0:
            chosen.append(parameter)
    return chosen


def _different_rows(arguments: Arguments) -> list[int]:
    """Return the indices of a few rows, any two of which differ in at least one argument."""
    num_rows = arguments.num_rows or 0
    tried = dict.fromkeys([0, num_rows - 1, num_rows // 2, *range(min(num_rows, _MOST_TRIED))])
    chosen: list[int] = []
    for number in tried:
        if len(chosen) < _MOST_ROWS and not any(_same_row(arguments, number, other) for other in chosen):
            chosen.append(number)
    return chosen


def _same_row(arguments: Arguments, one: int, other: int) -> bool:
    rows = [tensor for tensor in arguments.tensors if arguments.of_rows(tensor)]
    if not rows:  # the arguments are lists of texts
        return bool(arguments.picked([one]) == arguments.picked([other]))
    return all(torch.equal(tensor[one], tensor[other]) for tensor in rows)


# -- comparison --------------------------------------------------------------------------------------------------------


def _require_same(name: str, num_rows: int, what: str, both: Both, bound: float) -> None:
    scale = sum(_norm(one) ** 2 for one in both[0]) ** 0.5 * _LEAST_SHARE  # a gradient may be rounding errors only
    for together, apart in zip(*both, strict=True):
        share = _distance(together, apart) / max(_norm(together), scale, _SMALLEST_NORM)
        if not share <= bound:
            raise InputError(
                f"gradient_cache embeds a batch in slices, but `{name}` does not compute each row by itself: its "
                f"{what} for {num_rows} rows together differs from separate calls (by a share of {share:.2g}; rounding "
                f"explains {bound:.2g}), because rows are compared in it, or random numbers are not torch's; name the "
                "part that embeds each row by itself, as in gradient_cache(samples=16,part=encoder), or leave "
                "gradient_cache out"
            )


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference of two tensors, where equal infinities and NaN in both count as equal."""
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    is_same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(is_same, 0.0, one.double() - other.double()).norm())


def _norm(tensor: Tensor) -> float:
    return float(torch.where(tensor.isfinite(), tensor.double(), 0.0).norm())


# -- constants for random numbers --------------------------------------------------------------------------------------


@contextmanager
def _constants_for_random_numbers(module: nn.Module, arguments: Arguments) -> Iterator[_Constants]:
    """Compute without randomness, autocast and TF32 while the block runs."""
    tensors = [*arguments.tensors, *module.parameters()]
    device = tensors[0].device if tensors else torch.device("cpu")
    precision = torch.get_float32_matmul_precision()
    with RandomNumbers.now(tensors).kept(), torch.autocast(device.type, enabled=False), _Constants() as constants:
        torch.set_float32_matmul_precision("highest")
        try:
            yield constants
        finally:
            torch.set_float32_matmul_precision(precision)


class _Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which dropout keeps all elements, and other random numbers are their mean."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._types: set[torch.dtype] = set()

    @property
    def bound(self) -> float:
        """The relative tolerance for rounding in the coarsest dtype of any result so far."""
        types = self._types or {torch.float32}
        return max(torch.finfo(one).eps * _ROUNDINGS.get(one, _ROUNDINGS_OF_HALVES) for one in types)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(func, args, kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point():
            self._types.add(result.dtype)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        value = _CONSTANTS.get(name.removesuffix("_").removesuffix("_like"))
        if value is not None and name.endswith("_"):
            return args[0].fill_(value)
        if value is not None and isinstance(args[0], Tensor):
            return torch.full_like(args[0], value)
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        return func(**{**given, **{one: 0.0 for one in ("dropout_p", "dropout") if one in given}})


_CONSTANTS = {"bernoulli": 1.0, "uniform": 0.5, "rand": 0.5, "normal": 0.0, "randn": 0.0}


class _explained:
    """A context that adds a note about the call to any error that the module raises.

    It is a class, because it must see errors of any type. It suppresses no error.
    """

    def __init__(self, name: str, num_rows: int, arguments: Arguments) -> None:
        self._note = (
            f"(gradient_cache called `{name}` with {num_rows} of {arguments.num_rows} rows, to check that it computes "
            "each row by itself; if it does not, leave gradient_cache out)"
        )

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Add the note to the error, if any."""
        if error is not None:
            error.add_note(self._note)
