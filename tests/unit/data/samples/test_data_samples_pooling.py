"""Window predictions pooled to texts: compared with numpy, in any order, with as few open texts as possible."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.samples.pooling import Pooling, WindowPool

POOLINGS: tuple[Pooling, ...] = ("mean", "probability", "max", "vote")


def pooled(pooling: Pooling, logits: np.ndarray) -> np.ndarray:
    """Pool one text; each row of `logits` is a window."""
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    if pooling == "vote":
        return np.eye(logits.shape[1])[logits.argmax(1)].mean(0)
    return {"mean": logits.mean(0), "probability": probabilities.mean(0), "max": logits.max(0)}[pooling]


@given(
    nums=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    pooling=st.sampled_from(POOLINGS),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 100),
    is_shuffled=st.booleans(),
)
def test_every_text_is_pooled_once_from_all_its_windows(nums, pooling, batch_size, seed, is_shuffled):
    generator = np.random.default_rng(seed)
    parents = np.repeat(np.arange(len(nums)), nums)
    logits = generator.normal(size=(len(parents), 3)).astype(np.float32)
    order = generator.permutation(len(parents)) if is_shuffled else np.arange(len(parents))
    pool = WindowPool(pooling, lambda texts: np.array(nums)[texts])
    found: dict[int, np.ndarray] = {}
    for begin in range(0, len(order), batch_size):
        windows = order[begin : begin + batch_size]
        texts, outputs = pool.add(parents[windows], torch.from_numpy(logits[windows]))
        assert not set(texts.tolist()) & found.keys()
        found |= dict(zip(texts.tolist(), outputs.numpy(), strict=True))
        if not is_shuffled:
            assert pool.num_open <= 1
    assert pool.num_open == 0
    assert sorted(found) == list(range(len(nums)))
    for text, output in found.items():
        expected = pooled(pooling, logits[parents == text].astype(np.float64))
        np.testing.assert_allclose(output, expected, rtol=1e-9, atol=1e-9)


def test_a_tie_of_votes_is_broken_by_probability():
    pool = WindowPool("vote", lambda texts: np.full(len(texts), 2))
    _, outputs = pool.add(np.array([5, 5]), torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    assert outputs.argmax(1).tolist() == [1]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_batch_that_completes_no_text_gives_none(pooling: Pooling):
    pool = WindowPool(pooling, lambda texts: np.full(len(texts), 3))
    texts, outputs = pool.add(np.array([0, 0]), torch.zeros(2, 4, dtype=torch.bfloat16))
    assert texts.tolist() == []
    assert outputs.shape == (0, 4)
    assert pool.num_open == 1
