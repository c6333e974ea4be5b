"""Importance scores of the rows of weights. A row is a slice of a weight along one of its dimensions.

- ``magnitude``: the norm of the weights that read a feature, and of the weights that write it. It needs no data.
- ``taylor``: the change of the loss, to first order, if a row were zero: for each batch the absolute value of the sum
  of weight times gradient over the row, summed over batches (Molchanov et al. 2019, arXiv:1906.10771). Michel et al.
  2019 (arXiv:1905.10650) differentiate by a mask, which gives the same number.
- ``activation``: the mean absolute value of an input feature, times the norm of the weights that read it (Sun et al.
  2023, arXiv:2306.11695, with one score per feature in place of one per weight). Padding does not count.

All sums are in float64, in the order of batches and modules, so equal arguments give bitwise equal results.
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
    """The rows of a module's ``weight`` along dimension ``dim``. ``num_grouped`` neighbouring rows share a score."""

    module: Any
    dim: int
    num_grouped: int = 1


def norms(weight: Tensor, dim: int) -> Tensor:
    """Return the Euclidean norm of each row of a weight along a dimension, (rows,), in float64."""
    rows = weight.detach().double().movedim(dim, 0).reshape(weight.shape[dim], -1)
    size: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return size


def is_meta(model: nn.Module) -> bool:
    """Return whether a model has parameters on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def best(scores: Tensor | None, num_kept: int) -> Tensor:
    """Return the indices of the ``num_kept`` rows with the highest scores, in increasing order.

    Of rows with equal scores, the first is kept. If ``scores`` is ``None``, the first rows are kept.
    """
    if scores is None:
        return torch.arange(num_kept)
    return scores.argsort(descending=True, stable=True)[:num_kept].sort().values


def read_scores(model: nn.Module, importance: str, readers: Sequence[Rows], calibration: Calibration) -> list[Tensor]:
    """Return for each element of ``readers`` one score per group of its rows, (rows / ``num_grouped``,).

    ``importance`` is ``magnitude``, ``taylor`` or ``activation``; see the module.
    """
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
    """Return for each weight a score per row: the first-order change of the loss if that row were zero.

    The score is the absolute value of the change, summed over batches.

    Args:
        model: the model with the weights.
        weights: tuples of a weight, the dimension of its rows, and how many neighbouring rows share one score.
        calibration: the batches.

    Raises:
        WeightsError: if there are no batches, or the model returns no loss for them.
    """
    sums = [torch.zeros(weight.shape[dim] // num_grouped, dtype=torch.float64) for weight, dim, num_grouped in weights]
    with _all_trainable(model):
        for batch in _batches(calibration, "taylor"):
            loss = model(**batch).loss
            if loss is None:
                raise WeightsError(
                    f"importance=taylor needs a loss, but the model returned none for a batch of {', '.join(batch)}: "
                    "give batches with labels, or use importance=activation"
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
    """Make all parameters require gradients in the ``with`` block, and restore their gradients and flags afterwards."""
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
    """Return for each linear layer the mean absolute value of each input feature, over all tokens except padding.

    Raises:
        WeightsError: if there are no batches, or no batch goes through a layer.
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
            f"importance=activation cannot score {len(idle)} of {len(modules)} layers (such as a "
            f"{type(modules[idle[0]]).__name__}), because no batch passes through them: use importance=magnitude"
        )
    return [sums[place] / counts[place] for place in range(len(modules))]


def passes(model: nn.Module, modules: Sequence[nn.Module], calibration: Calibration, look: Look) -> None:
    """Run the model on all batches, and call ``look`` with the input and output of each of ``modules``.

    Args:
        model: the model to run, without gradients.
        modules: the modules to observe.
        calibration: the batches.
        look: called with the index of a module in ``modules``, the attention mask of the batch (B, T) or ``None``, the
            module's first argument, and its output.

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
    """Return the features of all tokens except padding, (tokens, features). Without a mask, all tokens count."""
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
            f"importance={importance} needs data, but there are {num_batches} batches: give some, or use "
            "importance=magnitude"
        )
