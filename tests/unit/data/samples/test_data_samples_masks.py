"""Masks that separate texts, by hand and in the attention functions that use them."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from plimsoll.data.samples.masks import block_diagonal_mask, flex_mask, varlen_lengths

POSITIONS = torch.tensor([[0, 1, 0, 0, 1], [0, 1, 2, 3, 0]])  # rows with texts of 2, 1 and 2 tokens, and of 4 and 1


def test_a_token_looks_at_its_own_text():
    causal = block_diagonal_mask(POSITIONS)
    assert causal.shape == (2, 1, 5, 5)
    assert causal[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    both_ways = block_diagonal_mask(POSITIONS, causal=False)
    assert both_ways[1, 0].int().tolist() == [[1, 1, 1, 1, 0]] * 4 + [[0, 0, 0, 0, 1]]


def test_with_a_type_it_is_added_to_scores():
    added = block_diagonal_mask(POSITIONS, dtype=torch.bfloat16)
    assert added.dtype == torch.bfloat16
    assert torch.equal(added == 0, block_diagonal_mask(POSITIONS))
    assert added.min() == torch.finfo(torch.bfloat16).min


# Without compilation, flex_attention warns once that it is slow. The test checks only the mask.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_gives_what_the_mask_gives(causal: bool):
    from torch.nn.attention.flex_attention import create_mask, flex_attention

    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 5, 16, generator=generator)
    mask = flex_mask(POSITIONS, causal)
    dense = create_mask(mask.mask_mod, 2, 1, 5, 5, device="cpu")
    assert torch.equal(dense, block_diagonal_mask(POSITIONS, causal))
    plain = scaled_dot_product_attention(query, key, value, attn_mask=block_diagonal_mask(POSITIONS, causal))
    flexible = flex_attention(query, key, value, block_mask=mask)
    torch.testing.assert_close(flexible, plain, atol=1e-6, rtol=1e-6)


def test_varlen_lengths_say_where_texts_begin():
    cumulative, longest = varlen_lengths(POSITIONS)
    assert cumulative.tolist() == [0, 2, 3, 5, 9, 10]
    assert cumulative.dtype == torch.int32
    assert longest == 4
