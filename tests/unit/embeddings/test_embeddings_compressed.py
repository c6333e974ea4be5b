"""Compressed vectors: their facts are correct, and a factorization is the best of its rank."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.embeddings import compressed
from plimsoll.embeddings.compressed import FactorizedEmbedding, ProductQuantizedEmbedding, low_rank, product_quantized
from plimsoll.embeddings.subsets import take_subset
from plimsoll.errors import EmbeddingError


def vectors(num_rows: int = 600, dimension: int = 12, seed: int = 0) -> np.ndarray:
    """Return rows that combine a few directions with some noise, like word vectors."""
    generator = np.random.default_rng(seed)
    directions = generator.normal(size=(4, dimension))
    return (
        generator.normal(size=(num_rows, 4)) @ directions + 0.1 * generator.normal(size=(num_rows, dimension))
    ).astype(np.float32)


def cosines(before: np.ndarray, module: nn.Module) -> np.ndarray:
    with torch.no_grad():
        after = module(torch.arange(len(before))).numpy().astype(np.float64)
    kept = before.any(axis=1)
    before, after = before[kept].astype(np.float64), after[kept]
    return (before * after).sum(axis=1) / np.linalg.norm(before, axis=1) / np.linalg.norm(after, axis=1)


@pytest.mark.parametrize("make", [lambda rows: low_rank(rows, 3), lambda rows: product_quantized(rows, 3)])
@pytest.mark.parametrize("block_rows", [100, 4096])
def test_the_facts_are_those_that_are_worked_out_again(make, block_rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compressed, "_BLOCK_ROWS", block_rows)
    rows = vectors()
    rows[17] = 0  # a zero vector has no cosine and does not count
    module, facts = make(rows)
    expected = cosines(rows, module)
    assert len(expected) == 599
    assert facts.mean_cosine == pytest.approx(expected.mean(), abs=1e-5)
    assert facts.low_cosine == pytest.approx(np.quantile(expected, 0.01), abs=1e-5)
    assert facts.least_cosine == pytest.approx(expected.min(), abs=1e-5)
    assert 0.8 < facts.mean_cosine < 1
    assert (facts.num_rows, facts.dimension, facts.num_bytes_before) == (600, 12, 600 * 12 * 4)
    assert facts.num_bytes_after == sum(tensor.nbytes for tensor in module.state_dict().values())
    assert (module.num_embeddings, module.embedding_dim) == (600, 12)


@pytest.mark.parametrize("rank", [1, 4, 11])
def test_a_factorization_is_the_truncated_singular_value_decomposition(rank: int):
    rows = vectors()
    module, facts = low_rank(rows, rank)
    left, values, right = np.linalg.svd(rows.astype(np.float64), full_matrices=False)
    best = (left[:, :rank] * values[:rank]) @ right[:rank]
    with torch.no_grad():
        made = module(torch.arange(600)).numpy()
    assert np.allclose(made, best, atol=1e-4)
    assert isinstance(module, FactorizedEmbedding)
    assert facts.num_bytes_after == 4 * (600 * rank + rank * 12)
    assert (facts.method, facts.detail) == ("low-rank factorization", f"rank {rank}")


def test_a_factorization_can_be_trained():
    module, _ = low_rank(vectors(), 2)
    ids = torch.tensor([[1, 2], [2, 5]])
    target = torch.zeros(2, 2, 12)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (module(ids) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert module(ids).shape == (2, 2, 12)


def test_quantized_vectors_are_the_nearest_of_their_centroids():
    rows = vectors(dimension=6)
    module, facts = product_quantized(rows, 2)
    assert isinstance(module, ProductQuantizedEmbedding)
    assert (module.codes.shape, module.codes.dtype) == ((600, 2), torch.uint8)
    assert module.centroids.shape == (2, 256, 3)
    assert facts.num_bytes_after == 600 * 2 + 2 * 256 * 3 * 4
    made = module(torch.arange(600)).numpy()
    for part in range(2):
        columns = slice(3 * part, 3 * part + 3)
        distances = np.square(rows[:, None, columns] - module.centroids[part].numpy()).sum(axis=2)
        chosen = np.square(rows[:, columns] - made[:, columns]).sum(axis=1)
        assert np.allclose(chosen, distances.min(axis=1), atol=1e-5)
    assert not list(module.parameters())
    assert module(torch.tensor([[[4]], [[9]]])).shape == (2, 1, 1, 6)


def test_as_many_rows_as_centroids_lose_nothing():
    rows = vectors(num_rows=256, dimension=4)
    module, facts = product_quantized(rows)
    assert np.allclose(module(torch.arange(256)).numpy(), rows, atol=1e-6)
    assert facts.least_cosine == pytest.approx(1, abs=1e-6)


def test_the_seed_says_which_centroids():
    rows = vectors()
    first, again, other = (product_quantized(rows, 3, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.centroids, again.centroids)
    assert not torch.equal(first.centroids, other.centroids)


@pytest.mark.parametrize(("dimension", "num_parts"), [(300, 75), (50, 10), (7, 1), (4, 1), (6, 2), (1, 1), (100, 25)])
def test_parts_have_about_four_numbers_each(dimension: int, num_parts: int):
    assert compressed._num_parts(dimension, None) == num_parts


def test_many_rows_are_sampled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compressed, "_SAMPLED_ROWS", 300)
    stages = []
    _, facts = product_quantized(vectors(2000), 3, progress=lambda *stage: stages.append(stage))
    assert facts.mean_cosine > 0.9
    assert stages == [("quantizing", part, 3) for part in (1, 2, 3)]


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_subset_keeps_its_row_for_padding(tmp_path: Path, precision: str):
    rows = vectors(300)
    lines = [f"w{number} {' '.join(map(str, row))}\n" for number, row in enumerate(rows)]
    (tmp_path / "x").write_text("".join(lines))
    words = ["<pad>", *(f"w{number}" for number in range(300))]
    subset = take_subset(tmp_path / "x", words, padding="<pad>", precision=precision)
    for module, facts in (product_quantized(subset, 3), low_rank(subset, 4)):
        assert not module(torch.tensor([0, 1, 0]))[[0, 2]].any()
        assert module(torch.tensor([1])).any()
        assert facts.num_bytes_before == subset.rows.nbytes
        assert facts.mean_cosine > 0.9
    assert low_rank(subset, 4)[0].rows.padding_idx == 0


def test_an_embedding_of_any_type_can_be_made_smaller():
    rows = torch.tensor(vectors())
    for dtype in (torch.float32, torch.bfloat16):
        embedding = nn.Embedding.from_pretrained(rows.to(dtype), padding_idx=2)
        module, facts = low_rank(embedding, 4)
        assert facts.mean_cosine > 0.98
        assert facts.num_bytes_before == embedding.weight.nbytes
        assert module.rows.padding_idx == 2
        assert product_quantized(embedding, 3)[0].padding_idx == 2


def test_modules_are_moved_and_kept_like_any_other(tmp_path: Path):
    module, _ = product_quantized(vectors(), 3)
    torch.save(module.state_dict(), tmp_path / "state")
    other, _ = product_quantized(vectors(seed=1), 3)
    other.load_state_dict(torch.load(tmp_path / "state"))
    assert torch.equal(other(torch.arange(600)), module(torch.arange(600)))
    assert module.half()(torch.tensor([3])).dtype == torch.float16


@pytest.mark.parametrize("rank", [0, -1, 12, 13])
def test_a_rank_that_saves_nothing_is_an_error_that_says_which_do(rank: int):
    with pytest.raises(
        EmbeddingError, match=rf"rank {rank} saves no memory for 600 vectors of 12 numbers: give a rank .* 11"
    ):
        low_rank(vectors(), rank)
    low_rank(vectors(), 11)


def test_what_cannot_be_quantized_is_an_error_that_says_what_can():
    with pytest.raises(
        EmbeddingError, match="12 numbers cannot be split into 5 equal parts: give one of 1, 2, 3, 4, 6, 12"
    ):
        product_quantized(vectors(), 5)
    with pytest.raises(EmbeddingError, match="255 rows are fewer than 256 centroids: keep them as they are"):
        product_quantized(vectors(255))
    for make in (lambda rows: product_quantized(rows), lambda rows: low_rank(rows, 1)):
        with pytest.raises(
            EmbeddingError, match=r"vectors of shape \(3,\) are not a matrix: give an array \(rows, numbers\)"
        ):
            make(np.ones(3))


def test_vectors_without_any_direction_are_an_error():
    for make in (lambda rows: product_quantized(rows, 1), lambda rows: low_rank(rows, 1)):
        with pytest.raises(EmbeddingError, match=r"vectors of shape \(300, 4\) are all zeros: give"):
            make(np.zeros((300, 4), np.float32))
