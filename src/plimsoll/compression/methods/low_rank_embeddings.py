"""Two factors in place of the token embedding: rows as wide as the rank, and a matrix that widens them.

The factors come from an SVD of the embedding. ALBERT trains them from the start (Lan et al. 2019, arXiv:1909.11942). An
output layer that is tied to the embedding becomes two factors as well: a matrix, then the same rows, which stay tied.
Its matrix is separate from the embedding's, so that each can learn. An untied output layer does not change.

Not handled: embeddings that several parts of a model read (encoder-decoders), scaled embeddings (Gemma), and recurrent
models of Plimsoll, whose configuration has no field for factors.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.layers import is_of_transformers
from plimsoll.compression.methods.low_rank import rank_for
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of
from plimsoll.weights.structure import factored, note, put

_DEFAULT_SHARE = 0.5


class LowRankEmbeddings(Shrinker):
    """Factorization of the token embedding."""

    name = "low_rank_embeddings"
    saves = (
        "the file, and the memory of weights, gradients and optimizer states, by the share of the embedding; a "
        "forward pass has one more small matrix product, and a tied output layer fewer operations"
    )
    tried = ({"share": 0.5}, {"share": 0.75})

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why the embedding cannot be factored, for example if the rank is too large; else ``None``."""
        model: Any = bundle.model
        if not is_of_transformers(model):
            return (
                f"the configuration of {type(model).__name__} has no field for a factored embedding, since it is not a "
                "transformers model: train it with a smaller `model.embedding_size` instead"
            )
        table = model.get_input_embeddings()
        if type(table) is not nn.Embedding:
            return f"the token embedding of {type(model).__name__} is a {type(table).__name__}, not an nn.Embedding"
        readers = [name for name, module in model.named_modules() if _has(module, table) and module is not table]
        if len(readers) > (model.get_output_embeddings() is not None and _is_tied(model)):
            return f"{len(readers) + 1} modules share the token embedding ({', '.join(readers)}): leave this out"
        num_rows, width = table.weight.shape
        rank = _rank(num_rows, width, choice)
        if rank < 1 or rank * (num_rows + width) >= num_rows * width:
            return (
                f"rank {rank} does not make an embedding of {num_rows} x {width} smaller: give a smaller rank or share"
            )
        return None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Replace the embedding by two factors; do the same with an output layer that is tied to it."""
        model: Any = bundle.model
        table: Any = model.get_input_embeddings()
        rank = _rank(table.num_embeddings, table.embedding_dim, choice)
        output = model.get_output_embeddings() if _is_tied(model) else None
        names = {id(module): name for name, module in model.named_modules()}
        made: Any = factored(table, rank)
        weight: Tensor = table.weight
        if not weight.is_meta:
            directions = _directions(weight, rank)
            learns = weight.requires_grad
            rows = weight.detach().double() @ directions
            made[0].weight = nn.Parameter(rows.to(weight.dtype), requires_grad=learns)
            made[1].weight = nn.Parameter(directions.to(weight.dtype), requires_grad=learns)
        put(model, names[id(table)], made)
        if output is not None:
            tied: Any = factored(output, rank)
            tied[0].weight = nn.Parameter(
                made[1].weight.detach().t().contiguous(), requires_grad=table.weight.requires_grad
            )
            tied[1].weight = made[0].weight
            if output.bias is not None:
                tied[1].bias = output.bias
            put(model, names[id(output)], tied)
            note(model, "factored", names[id(output)], rank)
        note(model, "factored", names[id(table)], rank)


def _rank(num_rows: int, width: int, choice: Choice) -> int:
    options: Any = options_of(choice)
    return int(options["rank"] or rank_for(num_rows, width, options["share"] or _DEFAULT_SHARE))


def _is_tied(model: Any) -> bool:
    output = model.get_output_embeddings()
    return output is not None and _has(output, model.get_input_embeddings())


def _has(module: Any, table: Any) -> bool:
    """Return whether the weight of the embedding ``table`` is also a direct parameter of ``module``."""
    return any(value is table.weight for value in module._parameters.values())


def _directions(weight: Tensor, rank: int) -> Tensor:
    """Return the first right singular vectors of an embedding, (width, rank)."""
    rows = weight.detach().double()
    _, vectors = torch.linalg.eigh(rows.t() @ rows)
    return cast(Tensor, vectors[:, -rank:].flip(1).contiguous())
