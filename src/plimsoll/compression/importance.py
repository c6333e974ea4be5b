"""How much each row of some weights matters: by their size, by their gradients, or by what flows through them.

- ``magnitude``: the norm of what reads a row, and of what writes it. Needs no data.
- ``taylor``: what the loss would change, to first order, if a row were zero: the sum of weight times gradient over the
  row, without its sign, summed over batches (Molchanov et al. 2019, arXiv:1906.10771; Michel et al. 2019,
  arXiv:1905.10650, who differentiate by a mask, which is the same number).
- ``activation``: the mean size of what comes in at a row times the norm of the weights that read it (Sun et al. 2023,
  arXiv:2306.11695, over rows); padding does not count.

All are summed in float64, in the order of batches and modules, so that equal arguments give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plimsoll.compression.base import Calibration
from plimsoll.errors import WeightsError

Look = Callable[[int, "Tensor | None", Tensor, Any], None]


class Rows(NamedTuple):
    """A dimension of a module's ``weight``, of which rows are judged, so many neighbours as one."""

    module: Any
    dim: int
    num_grouped: int = 1


def norms(weight: Tensor, dim: int) -> Tensor:
    """Return the norm of each row along a dimension, float64."""
    rows = weight.detach().double().movedim(dim, 0).reshape(weight.shape[dim], -1)
    size: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return size


def is_meta(model: nn.Module) -> bool:
    """Return whether a model has sizes alone."""
    return any(parameter.is_meta for parameter in model.parameters())


def best(scores: Tensor | None, num_kept: int) -> Tensor:
    """Return the numbers of the best rows, increasing; of equal ones the first. Without scores: the first rows."""
    if scores is None:
        return torch.arange(num_kept)
    return scores.argsort(descending=True, stable=True)[:num_kept].sort().values


def read_scores(model: nn.Module, importance: str, readers: Sequence[Rows], calibration: Calibration) -> list[Tensor]:
    """Return for each reader how much it makes of each row that it reads, (rows,)."""
    if importance == "taylor":
        weights = [(reader.module.weight, reader.dim, reader.num_grouped) for reader in readers]
        return first_order(model, weights, calibration)
    sizes = [norms(reader.module.weight, reader.dim) for reader in readers]
    if importance == "activation":
        flows = activity(model, [reader.module for reader in readers], calibration)
        products = (flow * size for flow, size in zip(flows, sizes, strict=True))
        return [one.reshape(-1, reader.num_grouped).sum(1) for one, reader in zip(products, readers, strict=True)]
    squares = (size.square().reshape(-1, one.num_grouped) for size, one in zip(sizes, readers, strict=True))
    return [one.sum(1).sqrt() for one in squares]


def first_order(model: nn.Module, weights: Sequence[tuple[Tensor, int, int]], calibration: Calibration) -> list[Tensor]:
    """Return for each weight and dimension what the loss would change if some rows were zero, summed over batches.

    Args:
        model: whose loss it is.
        weights: each with the dimension that its rows are along, and how many neighbours are judged as one.
        calibration: has the batches.

    Raises:
        WeightsError: if there are no batches, or their loss is not to be had.
    """
    sums = [torch.zeros(weight.shape[dim] // num_grouped, dtype=torch.float64) for weight, dim, num_grouped in weights]
    with _all_trainable(model):
        for batch in _batches(calibration, "taylor"):
            loss = model(**batch).loss
            if loss is None:
                raise WeightsError(
                    f"importance by taylor needs a loss, but a batch of {', '.join(batch)} gave none: give batches "
                    "with labels, or use importance=activation"
                )
            loss.backward()
            for total, (weight, dim, _) in zip(sums, weights, strict=True):
                if weight.grad is not None:
                    change = weight.detach().double() * weight.grad.double()
                    total.add_(change.movedim(dim, 0).reshape(len(total), -1).sum(1).abs())
            model.zero_grad(set_to_none=True)
    return sums


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    """All parameters have gradients for a while; those they had are put back."""
    before = [(one, one.requires_grad, one.grad) for one in model.parameters()]
    for one, _, _ in before:
        one.requires_grad_(True)
        one.grad = None
    try:
        with torch.enable_grad():
            yield
    finally:
        for one, was_trainable, gradient in before:
            one.requires_grad_(was_trainable)
            one.grad = gradient


def activity(model: nn.Module, modules: Sequence[nn.Module], calibration: Calibration) -> list[Tensor]:
    """Return for each linear layer the mean size of each feature of its input, over all tokens that are no padding.

    Raises:
        WeightsError: if there are no batches.
    """
    sums: dict[int, Tensor] = {}
    counts = [0] * len(modules)

    def look(place: int, mask: Tensor | None, given: Tensor, _: Any) -> None:
        rows = tokens_of(given, mask)
        sums[place] = sums.get(place, 0) + rows.double().abs().sum(0)
        counts[place] += len(rows)

    passes(model, modules, calibration, look)
    idle = [place for place in range(len(modules)) if not counts[place]]
    if idle:
        raise WeightsError(
            f"importance by activation found {len(idle)} of {len(modules)} layers that no batch went through, such as "
            f"a {type(modules[idle[0]]).__name__}: use importance=magnitude"
        )
    return [sums[place] / counts[place] for place in range(len(modules))]


def passes(model: nn.Module, modules: Sequence[nn.Module], calibration: Calibration, look: Look) -> None:
    """Run all batches, and look at what comes in and goes out of some modules.

    Args:
        model: what is run, without gradients.
        modules: which are looked at.
        calibration: has the batches.
        look: is given a module's place, the mask of the batch, the first input and what was returned.

    Raises:
        WeightsError: if there are no batches.
    """
    masks: list[Tensor | None] = [None]

    def hook_of(place: int) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], returned: Any) -> None:
            look(place, masks[0], [*arguments, *named.values()][0], returned)

        return hook

    hooks = [module.register_forward_hook(hook_of(place), with_kwargs=True) for place, module in enumerate(modules)]
    try:
        for batch in _batches(calibration, "activation"):
            masks[0] = batch.get("attention_mask")
            with torch.no_grad():
                model(**batch)
    finally:
        for hook in hooks:
            hook.remove()


def tokens_of(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the features of all tokens but padding as rows."""
    hidden = hidden.detach()
    if mask is not None and hidden.dim() > 2 and hidden.shape[:2] == mask.shape:
        return hidden[mask.bool()].flatten(0, -2) if hidden.dim() > 3 else hidden[mask.bool()]
    return hidden.reshape(-1, hidden.shape[-1])


def _batches(calibration: Calibration, importance: str) -> Iterator[Mapping[str, Tensor]]:
    num_batches = 0
    for batch in calibration.batches():
        num_batches += 1
        yield batch
    if num_batches == 0:
        raise WeightsError(
            f"importance by {importance} looks at data, and there are {num_batches} batches: give some, or use "
            "importance=magnitude"
        )
