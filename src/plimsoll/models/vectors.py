"""Pretrained word vectors in the models of a job: which module they go into, and whether they fit.

Covers ``torch.nn.Embedding``: that of a recurrent model, what ``get_input_embeddings`` of a Hugging Face model returns,
or the only one of a model of the user's that has as many rows as there are tokens. Does NOT cover models whose word
embedding is of another class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plimsoll.embeddings.opening import dimension_of
from plimsoll.embeddings.table import Table
from plimsoll.errors import JobError
from plimsoll.records.embeddings import VectorSource


def with_dimension(fields: dict[str, Any], source: VectorSource | None) -> dict[str, Any]:
    """Return the fields of a recurrent model with the size of its embedding, where only the vectors say it.

    Raises:
        JobError: if the file of the vectors cannot be used.
    """
    if source is None or "embedding_size" in fields:
        return fields
    return {**fields, "embedding_size": dimension_of(source)}


def prepare_embedding(model: nn.Module, source: VectorSource, num_rows: int) -> nn.Embedding:
    """Have the word embedding of a model get gradients or not, as the job says, and return it.

    Raises:
        JobError: if the model has none.
    """
    embedding = word_embedding(model, num_rows)
    users = [
        name
        for name, module in model.named_modules()
        if any(parameter is embedding.weight for parameter in module.parameters(recurse=False))
    ]
    if len(users) > 1 and not source.trainable:
        raise JobError(
            f"embeddings: the weight of {users[0]} is that of {users[1]} too, which would never be trained: set "
            "embeddings.trainable to true, or make a model that does not tie them"
        )
    embedding.weight.requires_grad_(source.trainable)
    return embedding


def require_fitting(model: nn.Module, source: VectorSource, num_rows: int) -> None:
    """Check that the vectors of a job can be put into its model.

    Raises:
        JobError: if the file cannot be used, or has vectors of another size than the model.
    """
    dimension, embedding = dimension_of(source), word_embedding(model, num_rows)
    if embedding.embedding_dim != dimension:
        field = "embedding_size" if hasattr(model, "recurrent") else "the size of its embedding"
        raise JobError(
            f"embeddings: {source.path} has vectors of {dimension} numbers, but the model has an embedding of "
            f"{embedding.embedding_dim}: set {field} to {dimension}, or give vectors of {embedding.embedding_dim}"
        )


def word_embedding(model: nn.Module, num_rows: int) -> nn.Embedding:
    """Return the module that turns tokens into vectors.

    Args:
        model: the model.
        num_rows: how many tokens there are.

    Raises:
        JobError: if there is none, or it cannot be told which of several it is.
    """
    ask = getattr(model, "get_input_embeddings", None)
    embedding = ask() if callable(ask) else None
    if embedding is None:
        found = [
            module for module in model.modules() if isinstance(module, nn.Embedding) and len(module.weight) >= num_rows
        ]
        embedding = found[0] if len(found) == 1 else None
    if not isinstance(embedding, nn.Embedding):
        raise JobError(
            f"embeddings: cannot tell where {type(model).__name__} has its word embedding (an nn.Embedding of at least "
            f"{num_rows:,} rows): give the model a method get_input_embeddings that returns it, or leave embeddings out"
        )
    return embedding


@torch.no_grad()
def fill_embedding(embedding: nn.Embedding, table: Table) -> None:
    """Copy vectors into the first rows of an embedding, straight from the file that is mapped.

    Raises:
        JobError: if they are of another size.
    """
    num_rows, dimension = table.vectors.shape
    if (embedding.embedding_dim, embedding.num_embeddings >= num_rows) != (dimension, True):
        raise JobError(
            f"embeddings: {num_rows:,} vectors of {dimension} numbers do not fit an embedding of "
            f"{tuple(embedding.weight.shape)}: give the model one of that size"
        )
    block_rows = max((1 << 20) // dimension, 1)
    for begin in range(0, num_rows, block_rows):
        rows = torch.tensor(table.vectors[begin : begin + block_rows])
        embedding.weight[begin : begin + len(rows)].copy_(rows)
