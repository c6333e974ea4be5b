"""Word vectors in models: the module that receives them, checks that they fit, and whether they are trained."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.embeddings.subsets import take_subset
from plimsoll.errors import JobError
from plimsoll.models.build import build_model
from plimsoll.models.vectors import fill_embedding, require_fitting, word_embedding
from plimsoll.records.embeddings import VectorSource
from plimsoll.records.job import Job

WORDS = ["the", "of", "a"]


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    path = tmp_path / "vectors.txt"
    path.write_text("the 1 2 3\nof 4 5 6\n")
    return path


def job(vectors: Path, **fields) -> Job:
    fields = {"model": {"architecture": "gru", "hidden_size": 4}, "embeddings": str(vectors)} | fields
    return Job.from_fields({"data": "a.txt", **fields})


def test_a_recurrent_model_takes_the_size_of_its_embedding_from_the_vectors(vectors):
    for device in ("cpu", "meta"):
        model = build_model(job(vectors), 3, None, 0, device=device)
        assert model.embedding.weight.shape == (3, 3)
        assert not model.embedding.weight.requires_grad
        assert model.head.weight.requires_grad
    trained = build_model(job(vectors, embeddings={"path": str(vectors), "trainable": True}), 3, None, 0)
    assert trained.embedding.weight.requires_grad


@pytest.mark.parametrize(
    ("model", "size"), [({"architecture": "lstm", "embedding_size": 8}, 8), ({"architecture": "bert", **{}}, 768)]
)
def test_vectors_of_another_size_than_the_model_are_refused(vectors, model, size):
    fields = {"num_hidden_layers": 1} if model["architecture"] == "bert" else {}
    task = "classification" if fields else "language-modeling"
    built = build_model(job(vectors, model=model | fields, task=task), 3, 2, 0, device="meta")
    with pytest.raises(JobError, match=rf"vectors of 3 numbers, but the model has an embedding of {size}: set"):
        require_fitting(built, VectorSource(path=str(vectors)), 3)


def test_a_frozen_embedding_whose_weight_is_the_output_too_is_refused(vectors):
    tied = {"architecture": "gru", "hidden_size": 3, "tie_weights": True}
    with pytest.raises(JobError, match="embedding and head share one weight, which would never be trained: set"):
        build_model(job(vectors, model=tied), 3, None, 0)
    trained = job(vectors, model=tied, embeddings={"path": str(vectors), "trainable": True})
    assert build_model(trained, 3, None, 0).head.weight.requires_grad


def test_a_file_that_cannot_be_used_is_a_fault_of_the_job(tmp_path):
    with pytest.raises(JobError, match=r"embeddings: there is no file .*none\.txt"):
        build_model(job(tmp_path / "none.txt"), 3, None, 0)


def test_rows_are_copied_and_those_beyond_the_words_stay(vectors, tmp_path):
    subset = take_subset(vectors, WORDS, missing="mean", cache=tmp_path / "cache")
    embedding = nn.Embedding(5, 3)
    before = embedding.weight.detach().clone()
    fill_embedding(embedding, subset.table)
    assert embedding.weight[:3].tolist() == [[1, 2, 3], [4, 5, 6], [2.5, 3.5, 4.5]]
    assert torch.equal(embedding.weight[3:], before[3:])
    assert np.array_equal(subset.rows[0], [1, 2, 3])
    with pytest.raises(JobError, match=r"3 vectors of 3 numbers do not fit an embedding of \(2, 3\)"):
        fill_embedding(nn.Embedding(2, 3), subset.table)


class Pair(nn.Module):
    """A model with two embeddings, either of which could be the word embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.others = nn.Embedding(10, 3), nn.Embedding(10, 3)


class Asked(Pair):
    """A model that names its word embedding."""

    def get_input_embeddings(self) -> nn.Embedding:
        return self.others


def test_the_word_embedding_is_what_the_model_says_or_the_only_one_that_is_large_enough():
    asked = Asked()
    assert word_embedding(asked, 10) is asked.others
    positions = nn.ModuleList([nn.Embedding(4, 3), nn.Embedding(10, 3)])
    assert word_embedding(positions, 10) is positions[1]
    for model, name in ((Pair(), "Pair"), (nn.Linear(2, 2), "Linear")):
        with pytest.raises(JobError, match=rf"cannot tell where {name} has its word embedding .* at least 10 rows"):
            word_embedding(model, 10)
