"""A table of embeddings whose rows are integers of torchao, of which only those that are looked up are decoded.

torchao itself decodes the whole table in every pass, and then looks up. Here the integers and the scales of the rows
are looked up and multiplied: the same numbers, bit for bit, in the memory of the rows. The module keeps the weight that
it was made of, so a model is saved as before.

Covers rows with a scale each and zero points that are zero, as ``Int8WeightOnlyConfig`` makes them. Does NOT learn.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from plimsoll.weights.parts import plain_parts, replace_modules


class CodedEmbedding(nn.Embedding):
    """An ``nn.Embedding`` over a weight of torchao with int8 rows.

    Args:
        weight: (V, E), in the place of the table's own.
        padding_idx: of the table that this is put in the place of.
    """

    def __init__(self, weight: nn.Parameter, padding_idx: int | None) -> None:
        rows, width = weight.shape
        super().__init__(rows, width, padding_idx=padding_idx, device="meta")
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """Decode the rows of some tokens."""
        parts = plain_parts(self.weight)
        rows = functional.embedding(input, parts["qdata"]).to(self.weight.dtype)
        # The scales of 16-bit weights are wider than these: the product is rounded, as torchao rounds it.
        return (rows * functional.embedding(input, parts["scale"])).to(self.weight.dtype)


def decode_rows_only(model: nn.Module) -> None:
    """Put a `CodedEmbedding` in the place of each plain table whose rows are coded."""
    replace_modules(model, _decoding)


def _decoding(module: nn.Module) -> nn.Module | None:
    if type(module) is not nn.Embedding or module.max_norm is not None or not _has_coded_rows(module.weight):
        return None
    assert isinstance(module.weight, nn.Parameter)
    made = CodedEmbedding(module.weight, module.padding_idx)
    return made.train(module.training)


def _has_coded_rows(weight: Any) -> bool:
    parts = plain_parts(weight)
    is_int8 = type(weight).__name__ == "Int8Tensor"  # torchao's; it is not imported for a name
    return is_int8 and parts["scale"].shape == (len(weight), 1)
