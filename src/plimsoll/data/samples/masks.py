"""Attention masks that separate the texts of a packed row, derived from ``position_ids`` that restart with each text.

Most causal language models of transformers derive the separation from ``position_ids``
(``masking_utils.find_packed_sequence_indices``). Pass them ``use_cache=False`` and no ``attention_mask``. This
works for any number of rows with eager attention, SDPA and FlexAttention, and for one row with FlashAttention. The
masks of this module are for other models. Not handled: sliding windows, attention between two inputs
(encoder-decoder).

Shapes: B rows, T tokens of a row, D texts in all rows together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class VarlenLengths(NamedTuple):
    """Arguments of ``torch.nn.attention.varlen.varlen_attn`` for the texts of all rows.

    ``cumulative_D`` (D + 1,) holds the cumulative lengths of the texts, from 0. ``longest`` is the maximum length.
    """

    cumulative_D: Tensor
    longest: int


def block_diagonal_mask(position_ids_BT: Tensor, causal: bool = True, dtype: torch.dtype | None = None) -> Tensor:
    """Return a mask (B, 1, T, T) that allows attention only within a text, and only to earlier tokens if ``causal``.

    Args:
        position_ids_BT: positions that restart at 0 with each text, (B, T) int64.
        causal: whether a token attends only to itself and earlier tokens.
        dtype: ``None`` for a boolean mask, as for ``scaled_dot_product_attention``. With a dtype the mask is added to
            scores: 0 where attention is allowed, else the lowest number of the dtype.
    """
    texts_BT = _texts(position_ids_BT)
    mask_BTT = texts_BT[:, :, None] == texts_BT[:, None, :]
    mask_B1TT = (mask_BTT.tril() if causal else mask_BTT)[:, None]
    if dtype is None:
        return mask_B1TT
    return torch.zeros(mask_B1TT.shape, dtype=dtype).masked_fill_(~mask_B1TT, torch.finfo(dtype).min)


def flex_mask(position_ids_BT: Tensor, causal: bool = True) -> BlockMask:
    """Return the mask of `block_diagonal_mask` for ``flex_attention``, which skips blocks without attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    texts_BT = _texts(position_ids_BT)

    def may_look(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_same_text = texts_BT[row, query] == texts_BT[row, key]
        return of_same_text & (query >= key) if causal else of_same_text

    num_rows, num_tokens = position_ids_BT.shape
    return create_block_mask(may_look, num_rows, None, num_tokens, num_tokens, device=str(position_ids_BT.device))


def varlen_lengths(position_ids_BT: Tensor) -> VarlenLengths:
    """Return the cumulative and longest lengths of texts in the concatenated rows (one sequence of B * T tokens)."""
    begins_D = torch.nonzero(position_ids_BT.flatten() == 0).flatten()
    total = torch.tensor([position_ids_BT.numel()], device=begins_D.device)
    cumulative_D = torch.cat((begins_D, total)).to(torch.int32)
    return VarlenLengths(cumulative_D, int(cumulative_D.diff().max()))


def _texts(position_ids_BT: Tensor) -> Tensor:
    """Return the number of the text to which each token belongs, (B, T), counted from 1 in each row."""
    return (position_ids_BT == 0).cumsum(1)
