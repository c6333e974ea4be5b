"""Attention that stops at the border of two texts in a row, told from positions that begin anew with each text.

Most causal language models of transformers derive it from ``position_ids`` by themselves, if they are given no
``attention_mask`` and keep no cache (``use_cache=False``; ``masking_utils.find_packed_sequence_indices``): with eager,
SDPA and FlexAttention for any number of rows, with FlashAttention for one row only. These masks are for other models.
NOT covered: sliding windows, attention between two inputs (encoder-decoder).

Shapes: B rows, T tokens of a row, D texts of all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class VarlenLengths(NamedTuple):
    """What ``torch.nn.attention.varlen.varlen_attn`` takes: where texts begin and end (D + 1,), and the longest."""

    cumulative_D: Tensor
    longest: int


def block_diagonal_mask(position_ids_BT: Tensor, causal: bool = True, dtype: torch.dtype | None = None) -> Tensor:
    """Return which tokens each may look at, (B, 1, T, T): those of its text, if ``causal`` only up to itself.

    Without ``dtype`` it is boolean, for ``scaled_dot_product_attention``; with one it is 0 or its lowest number, to be
    added to scores.
    """
    texts_BT = _texts(position_ids_BT)
    mask_BTT = texts_BT[:, :, None] == texts_BT[:, None, :]
    mask_B1TT = (mask_BTT.tril() if causal else mask_BTT)[:, None]
    if dtype is None:
        return mask_B1TT
    return torch.zeros(mask_B1TT.shape, dtype=dtype).masked_fill_(~mask_B1TT, torch.finfo(dtype).min)


def flex_mask(position_ids_BT: Tensor, causal: bool = True) -> BlockMask:
    """Return the same mask for ``flex_attention``, which skips blocks of two texts altogether."""
    from torch.nn.attention.flex_attention import create_block_mask

    texts_BT = _texts(position_ids_BT)

    def may_look(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_same_text = texts_BT[row, query] == texts_BT[row, key]
        return of_same_text & (query >= key) if causal else of_same_text

    num_rows, num_tokens = position_ids_BT.shape
    return create_block_mask(may_look, num_rows, None, num_tokens, num_tokens, device=str(position_ids_BT.device))


def varlen_lengths(position_ids_BT: Tensor) -> VarlenLengths:
    """Return where texts begin and end in the rows laid end to end (one sequence of B * T tokens)."""
    begins_D = torch.nonzero(position_ids_BT.flatten() == 0).flatten()
    total = torch.tensor([position_ids_BT.numel()], device=begins_D.device)
    cumulative_D = torch.cat((begins_D, total)).to(torch.int32)
    return VarlenLengths(cumulative_D, int(cumulative_D.diff().max()))


def _texts(position_ids_BT: Tensor) -> Tensor:
    """Return a number for each token that is the same for those of one text."""
    return (position_ids_BT == 0).cumsum(1)
