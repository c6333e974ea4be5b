"""A cache is copied with its structure; its tensors are shared only while they are needed."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from plimsoll.techniques.mechanisms.caches import CachesBefore


def filled(num_layers=2):
    cache = DynamicCache()
    for layer in range(num_layers):
        cache.update(torch.full((1, 1, 2, 1), layer + 1.0), torch.full((1, 1, 2, 1), -layer - 1.0), layer)
    return cache


def test_only_caches_are_taken():
    tensor = torch.ones(2)
    leaves = [tensor, filled(), None, 3]
    before = CachesBefore(leaves)
    assert before.without(leaves) == [tensor, None, None, 3]
    back = before.back_in(before.without(leaves))
    assert back[0] is tensor
    assert back[2:] == [None, 3]
    assert type(back[1]) is DynamicCache
    assert back[1] is not leaves[1]


def test_a_copy_is_as_the_cache_was_and_leaves_it_alone():
    cache = filled()
    before = CachesBefore([cache])
    cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 1)
    before.forget_unchanged()
    for _ in range(2):  # a graph may be run backward twice
        (again,) = before.back_in([None])
        assert again.layers[1].keys.flatten().tolist() == [2, 2]
        again.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 1)
        assert again.layers[1].keys.flatten().tolist() == [2, 2, 0]
    assert cache.layers[1].keys.flatten().tolist() == [2, 2, 0]


def test_layers_of_other_blocks_keep_their_length_only():
    cache = filled()
    before = CachesBefore([cache])
    cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 1)
    before.forget_unchanged()
    (again,) = before.back_in([None])
    assert again.get_seq_length() == 2
    assert again.layers[0].keys.device.type == "meta"
    with pytest.raises(RuntimeError):
        torch.cat([again.layers[0].keys, torch.zeros(1, 1, 1, 1)], dim=-2).sum().item()
    assert cache.layers[0].keys.flatten().tolist() == [1, 1]


def test_a_cache_that_is_only_read_is_kept():
    cache = filled()
    before = CachesBefore([cache])
    before.forget_unchanged()
    (again,) = before.back_in([None])
    assert again.layers[0].keys is cache.layers[0].keys


def test_a_cache_of_caches():
    """T5 has one: its dictionary of layers that already hold the encoder's keys must be copied, too."""
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    before = CachesBefore([cache])
    cache.cross_attention_cache.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    cache.is_updated[0] = True
    before.forget_unchanged()
    (again,) = before.back_in([None])
    assert not again.is_updated.get(0)
    assert again.cross_attention_cache.get_seq_length() == 0
    assert cache.cross_attention_cache.get_seq_length() == 1


def test_caches_are_known_by_their_class():
    assert CachesBefore.is_cache(filled())
    assert CachesBefore.is_cache(type("Own", (DynamicCache,), {})())
    assert not CachesBefore.is_cache(torch.ones(1))
    assert StaticCache.__module__ == DynamicCache.__module__
