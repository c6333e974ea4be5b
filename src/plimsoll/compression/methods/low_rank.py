"""Two factors in place of a linear layer: fewer weights and operations, if the rank is small.

The product of the factors is the matrix of this rank whose outputs on calibration data differ least from the layer's,
in the sum of squares: ``W' = U Uᵀ W`` with the first left singular vectors U of ``W L``. ``L Lᵀ`` is the sum of
``x xᵀ`` over the layer's inputs x (SVD-LLM, Wang et al. 2024, arXiv:2403.07378: truncation-aware whitening by
Cholesky). A small ridge is added to this sum, so that directions without inputs have a small weight. With
``aware=false``, a plain SVD is used. Blocks are factored in order, each with the inputs that the already factored
blocks produce. The sums for only one block are in memory at a time.

Covers the linear layers of blocks, each by itself. Not handled: layers outside blocks (embedding, output, classifier),
experts stored as one tensor, and recurrent layers, whose kernels in torch need the whole matrix.
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
_RIDGE_SHARE = 1e-6  # the ridge, as a share of the mean of the diagonal

Group = list[str]
"""Names of layers that have the same weight."""


class LowRank(Shrinker):
    """Factorization of the linear layers of blocks."""

    name = "low_rank"
    saves = (
        "the file, the memory of weights, gradients and optimizer states, and operations, by the share of factored "
        "layers; training saves one more activation for each of them, and small layers are not faster"
    )
    tried = ({"share": 0.25}, {"share": 0.5})

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why no layer can be factored: no linear layers in blocks, or a rank too large; else ``None``."""
        model = bundle.model
        names = linears_of_blocks(model)
        if not is_of_transformers(model) or not names:
            return (
                f"no linear layers in blocks: looked for nn.Linear and Conv1D in the numbered layers of "
                f"{type(model).__name__}, which must be a transformers model; use `units` for recurrent layers"
            )
        if not any(_rank(model.get_submodule(name), choice) for name in names):
            sizes = sorted({tuple(sizes_of(model.get_submodule(name))) for name in names})
            return (
                f"`{choice.in_full}` makes no layer of {', '.join(f'{a} x {b}' for a, b in sizes)} smaller: "
                "give a smaller rank or share"
            )
        return None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Replace each linear layer of a block by two factors, if these have fewer weights.

        Raises:
            WeightsError: if ``aware`` is true, but ``calibration`` has no batches.
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
    """Return the factors (out, rank) and (rank, in) whose product has the least output error; see the module.

    Args:
        weight: the weight to factor, (out, in).
        rank: the rank of the product.
        second_moment: the sum of ``x xᵀ`` over the layer's inputs x, (in, in); ``None`` for a plain SVD.
    """
    matrix = weight.detach().double()
    left, _, _ = torch.linalg.svd(_whitened(matrix, second_moment), full_matrices=False)
    left = left[:, :rank]
    right = left.t() @ matrix
    # Both factors get equal norms, which suits further training.
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
    """Return the rank for a layer; 0 if its factors would not have fewer weights."""
    num_in, num_out = sizes_of(module)
    options: Any = options_of(choice)
    share = options["share"] or _DEFAULT_SHARE
    rank: int = options["rank"] or rank_for(num_in, num_out, share)
    return rank if rank * (num_in + num_out) < num_in * num_out else 0


def rank_for(num_in: int, num_out: int, share: float) -> int:
    """Return the largest rank at which the two factors together have at most ``1 - share`` of the matrix's weights.

    ``share`` is the share of the weights to remove.
    """
    return int((1 - share) * num_in * num_out / (num_in + num_out))


def _blocks(model: nn.Module) -> Iterator[list[Group]]:
    """Yield the groups of linear layers of each block. Layers with the same weight form one group.

    A group belongs to the block of its first layer.
    """
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
    """Return for each group the sum of ``x xᵀ`` over the inputs x of its layers, (in, in).

    The key is the name of the group's first layer.

    Padding does not count.
    """
    if next(iter(calibration.batches()), None) is None:
        raise WeightsError(
            f"`low_rank` needs the inputs of {len(groups)} layers of each block, but there are no batches: give data, "
            "or set aware=false"
        )
    sums: dict[str, Tensor] = {}
    layers = [(group[0], model.get_submodule(name)) for group in groups for name in group]

    def look(place: int, mask: Tensor | None, given: Tensor, _: Any) -> None:
        rows, key = tokens_of(given, mask).double(), layers[place][0]
        moment = rows.t() @ rows
        sums[key] = sums[key].add_(moment) if key in sums else moment

    passes(model, [layer for _, layer in layers], calibration, look)
    return sums
