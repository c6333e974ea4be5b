"""Word vectors as an embedding: outputs, gradients and steps equal PyTorch's, and the file stays unchanged."""

import copy
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.embeddings.conversion import export
from plimsoll.embeddings.module import load, tied_output
from plimsoll.embeddings.subsets import Subset, take_subset
from plimsoll.errors import EmbeddingError

NUM_WORDS, DIMENSION = 40, 3
WORDS = ["<pad>", *(f"w{number}" for number in range(NUM_WORDS - 1))]
IDS = torch.tensor([[3, 0, 7], [7, 39, 0]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = np.random.default_rng(0).normal(size=(NUM_WORDS, DIMENSION)).tolist()
    lines = [f"{word} {' '.join(map(repr, row))}\n" for word, row in zip(WORDS[1:], rows, strict=False)]
    (tmp_path / "vectors").write_text("".join(lines))
    return tmp_path / "vectors"


@pytest.fixture
def subset(path: Path) -> Subset:
    return take_subset(path, WORDS, padding="<pad>")


def plain(subset: Subset, trainable: bool, sparse: bool = False) -> nn.Embedding:
    weight = torch.tensor(subset.rows)
    return nn.Embedding.from_pretrained(weight, freeze=not trainable, padding_idx=0, sparse=sparse)


def test_a_file_and_words_give_a_frozen_embedding(path: Path, subset: Subset):
    embedding = load(path, WORDS, padding="<pad>")
    assert type(embedding) is nn.Embedding
    assert (embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx) == (NUM_WORDS, DIMENSION, 0)
    assert embedding.weight.requires_grad is False
    assert embedding.training
    assert torch.equal(embedding.weight, torch.tensor(subset.rows))
    assert torch.equal(embedding(IDS), plain(subset, False)(IDS))
    assert not embedding.weight[0].any()


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_those_of_an_embedding_in_memory(subset: Subset, sparse: bool):
    ours, theirs = load(subset, trainable=True, sparse=sparse), plain(subset, True, sparse)
    weights = torch.arange(18.0).reshape(2, 3, 3)
    for embedding in (ours, theirs):
        (embedding(IDS) * weights).sum().backward()
    assert ours.weight.grad.is_sparse == theirs.weight.grad.is_sparse == sparse
    assert torch.equal(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())
    assert not ours.weight.grad.to_dense()[0].any()  # the padding row


@pytest.mark.parametrize(
    ("optimizer", "sparse"),
    [(torch.optim.SparseAdam, True), (torch.optim.SGD, True), (torch.optim.Adagrad, True), (torch.optim.Adam, False)],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # a warning of Adagrad itself
def test_training_gives_the_same_bits_and_leaves_the_file_as_it_is(subset: Subset, optimizer: type, sparse: bool):
    before = subset.table.path.read_bytes()
    ours, theirs = load(subset, trainable=True, sparse=sparse), plain(subset, True, sparse)
    for embedding in (ours, theirs):
        steps = optimizer(embedding.parameters(), lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            embedding(IDS).square().sum().backward()
            steps.step()
    assert torch.equal(ours.weight, theirs.weight)
    changed = (ours.weight != torch.tensor(subset.rows)).any(dim=1).nonzero().flatten().tolist()
    assert changed == [3, 7, 39]
    assert subset.table.path.read_bytes() == before
    assert torch.equal(load(subset).weight, torch.tensor(subset.rows))


def test_half_precision_is_kept_and_any_other_type_is_a_copy(path: Path, subset: Subset):
    half = load(path, WORDS, padding="<pad>", precision="float16")
    assert half.weight.dtype == torch.float16
    assert torch.equal(half.weight, torch.tensor(subset.rows).half())
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        assert torch.equal(load(subset, dtype=dtype).weight, torch.tensor(subset.rows).to(dtype))
    brain = load(subset, dtype=torch.bfloat16, trainable=True)
    brain(IDS).sum().backward()
    assert brain.weight.grad.dtype == torch.bfloat16
    assert torch.equal(brain(IDS), plain(subset, False)(IDS).bfloat16())


def test_an_embedding_outlives_the_subset_and_can_be_copied_and_kept(subset: Subset, tmp_path: Path):
    expected = torch.tensor(subset.rows)
    embedding = load(subset, trainable=True)
    del subset
    other = copy.deepcopy(embedding)
    with torch.no_grad():
        embedding.weight.zero_()
    assert torch.equal(other.weight, expected)
    torch.save(other.state_dict(), tmp_path / "state")
    embedding.load_state_dict(torch.load(tmp_path / "state"))
    assert torch.equal(embedding.weight, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_output_has_the_same_weight_and_gives_it_its_gradient(subset: Subset, dtype: torch.dtype):
    embedding = load(subset, trainable=True, dtype=dtype)
    output = tied_output(embedding)
    assert output.weight is embedding.weight
    assert (output.in_features, output.out_features, output.bias) == (DIMENSION, NUM_WORDS, None)
    model = nn.Sequential(embedding, output)
    assert len(list(model.parameters())) == 1
    model(IDS).square().sum().backward()
    reference = torch.tensor(subset.rows).to(dtype).requires_grad_()
    logits = nn.functional.linear(nn.functional.embedding(IDS, reference, padding_idx=0), reference)
    logits.square().sum().backward()
    assert torch.equal(model(IDS), logits)
    assert torch.equal(embedding.weight.grad, reference.grad)
    assert embedding.weight.grad[1].any()  # a word missing from the input has a gradient from the output


def test_an_output_cannot_be_tied_to_sparse_gradients(subset: Subset):
    with pytest.raises(
        EmbeddingError, match=r"of 40 rows with sparse=True cannot be tied: .*; load it with sparse=False"
    ):
        tied_output(load(subset, trainable=True, sparse=True))


def test_a_table_is_loaded_as_it_is_and_words_can_be_taken_from_it(subset: Subset, tmp_path: Path):
    export(subset.table, tmp_path / "rows.safetensors")
    embedding = load(tmp_path / "rows.safetensors", trainable=True)
    assert torch.equal(embedding.weight, torch.tensor(subset.rows))
    assert embedding.padding_idx == 0
    taken = load(str(tmp_path / "rows.safetensors"), ["w5", "W2"])
    assert torch.equal(taken.weight, torch.tensor(subset.rows)[[6, 3]])
    assert taken.padding_idx is None


def test_words_that_lack_or_are_too_much_are_errors(path: Path, subset: Subset, tmp_path: Path):
    with pytest.raises(
        EmbeddingError, match=r"vectors \(GloVe text\) needs vocabulary=: give a tokenizer, a file with a"
    ):
        load(path)
    with pytest.raises(EmbeddingError, match=r"the subset .* already has words: leave out vocabulary"):
        load(subset, ["w1"])
    (tmp_path / "rows.gz").write_bytes(gzip.compress(subset.table.path.read_bytes()))
    with pytest.raises(EmbeddingError, match=r"rows.gz \(Plimsoll table .* needs vocabulary="):
        load(tmp_path / "rows.gz")
    with pytest.raises(EmbeddingError, match="there is no file"):
        load(tmp_path / "absent", WORDS)


def test_options_that_would_change_nothing_are_errors(subset: Subset):
    with pytest.raises(
        EmbeddingError, match="rows of .* exist already: leave out missing, seed, or give the original file"
    ):
        load(subset, missing="zeros", seed=1)
    with pytest.raises(
        EmbeddingError, match="rows of .* exist already: leave out precision, or give the original file"
    ):
        load(subset.table.path, precision="float16")
