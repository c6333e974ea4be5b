"""Two factors in the place of a linear layer: less weight, and fewer operations, where the rank is small.

Of all matrices of a rank the one is taken whose outputs differ least, in the sum of squares, on the inputs that the
layer has on calibration data: ``W' = U Uᵀ W`` with the first left singular vectors U of ``W L``, where ``L Lᵀ`` is the
sum of ``x xᵀ`` over the inputs (SVD-LLM, Wang et al. 2024, arXiv:2403.07378: truncation-aware whitening by Cholesky). A
ridge lets directions that no input has count a little, as a plain SVD counts them; without ``aware``, that is all there
is. Blocks are done in order, each on what the ones before it, already in factors, give it: one block's sums are in
memory at a time.

The linear layers of blocks are covered, each by itself. It does NOT cover layers outside of blocks (embedding, output,
classifier), experts kept as one tensor, and recurrent layers, whose matrices torch's kernels take whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.changed_config import block_of
from plimsoll.compression.importance import passes, tokens_of
from plimsoll.compression.layers import is_of_transformers, linear_weight, linears_of_blocks
from plimsoll.errors import WeightsError
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of
from plimsoll.weights.structure import factored, note, put, sizes_of, use_parameters_of

_DEFAULT_SHARE = 0.25
_RIDGE_SHARE = 1e-6  # of the mean of the diagonal

Group = list[str]
"""Names of layers that have the same weight."""


class LowRank(Shrinker):
    """Linear layers of blocks become two factors."""

    name = "low_rank"
    saves = (
        "the file, the memory of the weights and of a training's gradients and optimizer states, and operations, by "
        "the share of the factored layers; a training keeps one more activation for each of them, and small layers "
        "are no faster"
    )
    tried = ({"share": 0.25}, {"share": 0.5})

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why this cannot be: no such layers, or no rank that pays."""
        model = bundle.model
        names = linears_of_blocks(model)
        if not is_of_transformers(model) or not names:
            return (
                f"no linear layers in blocks: looked for nn.Linear and Conv1D in the numbered layers of a "
                f"{type(model).__name__}, and found none that its configuration can say to be in factors; use "
                "`units` for recurrent layers"
            )
        if not any(_rank(model.get_submodule(name), choice) for name in names):
            sizes = sorted({tuple(sizes_of(model.get_submodule(name))) for name in names})
            return (
                f"no rank of `{choice.in_full}` makes a layer of {', '.join(f'{a} x {b}' for a, b in sizes)} smaller: "
                "give a smaller rank or share"
            )
        return None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Put factors in the place of layers.

        Raises:
            WeightsError: if it needs batches and there are none.
        """
        model = bundle.model
        is_aware = bool(options_of(choice)["aware"]) and not next(model.parameters()).is_meta
        for groups in _blocks(model):
            ranks = {group[0]: _rank(model.get_submodule(group[0]), choice) for group in groups}
            chosen = [group for group in groups if ranks[group[0]]]
            sums = _second_moments(model, chosen, calibration) if is_aware and chosen else {}
            for group in chosen:
                _factor(model, group, ranks[group[0]], sums.get(group[0]))


def best_factors(weight: Tensor, rank: int, second_moment: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the factors (out, rank) and (rank, in) whose product differs least from a matrix in what it gives.

    Args:
        weight: (out, in).
        rank: of the product.
        second_moment: the sum of ``x xᵀ`` over inputs, (in, in); ``None``: all directions count alike.
    """
    matrix = weight.detach().double()
    left, _, _ = torch.linalg.svd(_whitened(matrix, second_moment), full_matrices=False)
    left = left[:, :rank]
    right = left.t() @ matrix
    # Both factors get half of the size, as a training from here on would have them.
    scale = right.norm(dim=1).clamp(min=torch.finfo(right.dtype).tiny).sqrt()
    return tuple(one.to(weight.dtype).contiguous() for one in (left * scale, right / scale[:, None]))


def _whitened(matrix: Tensor, second_moment: Tensor | None) -> Tensor:
    if second_moment is None or not second_moment.diagonal().sum() > 0:
        return matrix
    ridge = _RIDGE_SHARE * second_moment.diagonal().mean()
    root, fault = torch.linalg.cholesky_ex(second_moment + ridge * torch.eye(len(second_moment), dtype=torch.float64))
    if int(fault) == 0:
        return cast(Tensor, matrix @ root)
    values, vectors = torch.linalg.eigh(second_moment)
    return cast(Tensor, matrix @ (vectors * (values.clamp(min=0) + ridge).sqrt()))


def _rank(module: nn.Module, choice: Choice) -> int:
    """The rank for a layer; 0 where factors would not be smaller."""
    num_in, num_out = sizes_of(module)
    options: Any = options_of(choice)
    share = options["share"] or _DEFAULT_SHARE
    rank: int = options["rank"] or rank_for(num_in, num_out, share)
    return rank if rank * (num_in + num_out) < num_in * num_out else 0


def rank_for(num_in: int, num_out: int, share: float) -> int:
    """Return the largest rank of which two factors have so much less than the matrix."""
    return int((1 - share) * num_in * num_out / (num_in + num_out))


def _blocks(model: nn.Module) -> Iterator[list[Group]]:
    """The layers, those with the same weight as one, by the block of the first of them."""
    by_weight: dict[int, Group] = {}
    for name in linears_of_blocks(model):
        by_weight.setdefault(id(model.get_submodule(name).weight), []).append(name)
    blocks: dict[str, list[Group]] = {}
    for group in by_weight.values():
        blocks.setdefault(block_of(group[0]), []).append(group)
    yield from blocks.values()


def _factor(model: nn.Module, group: Group, rank: int, second_moment: Tensor | None) -> None:
    before: Any = model.get_submodule(group[0])
    made: Any = factored(before, rank)
    learns = before.weight.requires_grad
    if not before.weight.is_meta:
        left, right = best_factors(linear_weight(before), rank, second_moment)
        made[0].weight = nn.Parameter(right, requires_grad=learns)
        made[1].weight = nn.Parameter(left, requires_grad=learns)
    if before.bias is not None:
        made[1].bias = before.bias
    for name in group:
        own = made
        if name != group[0]:
            own = factored(model.get_submodule(name), rank)
            use_parameters_of(made, own)
        put(model, name, own)
    for name in group:
        note(model, "factored", name, rank)


def _second_moments(model: nn.Module, groups: list[Group], calibration: Calibration) -> dict[str, Tensor]:
    """Sum ``x xᵀ`` over the inputs of layers, by the first name of a group; padding does not count."""
    if next(iter(calibration.batches()), None) is None:
        raise WeightsError(
            f"`low_rank` looks at what goes into {len(groups)} layers of each block, and there are no batches: give "
            "data, or set aware=false"
        )
    sums: dict[str, Tensor] = {}
    layers = [(group[0], model.get_submodule(name)) for group in groups for name in group]

    def look(place: int, mask: Tensor | None, given: Tensor, _: Any) -> None:
        rows, key = tokens_of(given, mask).double(), layers[place][0]
        moment = rows.t() @ rows
        sums[key] = sums[key].add_(moment) if key in sums else moment

    passes(model, [layer for _, layer in layers], calibration, look)
    return sums
