"""Pretrained word vectors for a job's models: find the embedding module that receives them, and check that they fit it.

The word embedding must be a ``torch.nn.Embedding``. It is found in a recurrent model, or by ``get_input_embeddings`` of
a Hugging Face model. In a user's model it is the only embedding with at least as many rows as tokens.

Not handled: models whose word embedding is of another class.
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
    """Return the fields of a recurrent model. If ``embedding_size`` is missing, it is the size of the vectors.

    Raises:
        JobError: if the file of the vectors cannot be used.
    """
    if source is None or "embedding_size" in fields:
        return fields
    return {**fields, "embedding_size": dimension_of(source)}


def prepare_embedding(model: nn.Module, source: VectorSource, num_rows: int) -> nn.Embedding:
    """Freeze the word embedding of a model or make it trainable, as the job specifies, and return it.

    Raises:
        JobError: if the model has no word embedding, or a frozen one is tied to another layer.
    """
    embedding = word_embedding(model, num_rows)
    users = [
        name
        for name, module in model.named_modules()
        if any(parameter is embedding.weight for parameter in module.parameters(recurse=False))
    ]
    if len(users) > 1 and not source.trainable:
        raise JobError(
            f"embeddings: {users[0]} and {users[1]} share one weight, which would never be trained: set "
            "embeddings.trainable to true, or use a model that does not tie them"
        )
    embedding.weight.requires_grad_(source.trainable)
    return embedding


def require_fitting(model: nn.Module, source: VectorSource, num_rows: int) -> None:
    """Check that the vectors of a job have the size of its model's word embedding.

    Raises:
        JobError: if the file cannot be used, or the sizes differ.
    """
    dimension, embedding = dimension_of(source), word_embedding(model, num_rows)
    if embedding.embedding_dim != dimension:
        field = "embedding_size" if hasattr(model, "recurrent") else "the size of its embedding"
        raise JobError(
            f"embeddings: {source.path} has vectors of {dimension} numbers, but the model has an embedding of "
            f"{embedding.embedding_dim}: set {field} to {dimension}, or give vectors of {embedding.embedding_dim}"
        )


def word_embedding(model: nn.Module, num_rows: int) -> nn.Embedding:
    """Return the word embedding of a model.

    Args:
        model: the model.
        num_rows: the number of tokens, which is the minimum number of rows.

    Raises:
        JobError: if the model has no word embedding, or several modules could be the word embedding.
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
    """Copy the vectors of a memory-mapped table into the first rows of an embedding.

    Raises:
        JobError: if the sizes differ.
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
