"""Word vectors as a ``torch.nn.Embedding`` whose memory is the cached file until they are changed.

The file is mapped copy-on-write. Opening it takes a millisecond, and processes that use the same vectors share its
pages. A page becomes private memory of a process when it is first written to. Frozen vectors therefore stay in the
file. If vectors are trained with sparse gradients, only the pages of rows that were updated become private.
``.to(device)`` copies directly from the file. Nevertheless, a limit on private memory (RLIMIT_DATA) counts the whole
mapping.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from plimsoll.device.dtypes import floating_type
from plimsoll.embeddings.opening import open_file
from plimsoll.embeddings.subsets import Subset, take_subset
from plimsoll.embeddings.table import Table, open_table
from plimsoll.errors import EmbeddingError


def load(
    source: str | Path | Subset,
    vocabulary: Any = None,
    *,
    trainable: bool = False,
    sparse: bool = False,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> nn.Embedding:
    """Return word vectors as an ``nn.Embedding`` on the host. It moves to a device with its model.

    Args:
        source: a file of word vectors, or a subset of one.
        vocabulary: the words of the rows, as for `plimsoll.embeddings.subset`. ``None`` for a subset, and for a table
            written by Plimsoll, whose rows are used unchanged.
        trainable: whether the vectors get gradients.
        sparse: whether gradients are sparse, for ``SparseAdam``, ``Adagrad`` and ``SGD``.
        dtype: data type of the weights, such as ``torch.float16`` or ``"fp16"``; ``None``: as in the file. Conversion
            to another data type needs a copy in memory.
        **options: options of `plimsoll.embeddings.subset`.

    Returns:
        an embedding with a weight of (rows, dimension).

    Raises:
        EmbeddingError: if the file or the words cannot be used, or if ``vocabulary`` is missing or not allowed.
        OutputError: if the cache cannot be written.
    """
    dtype = None if dtype is None else floating_type(dtype, EmbeddingError)
    table = _table_of(source, vocabulary, options)
    weight = torch.from_numpy(open_table(table.path, "copy").vectors)
    embedding = nn.Embedding(
        weight.shape[0],
        weight.shape[1],
        padding_idx=table.padding,
        sparse=sparse,
        _weight=weight if dtype is None else weight.to(dtype),
    )
    embedding.weight.requires_grad_(trainable)
    return embedding


def tied_output(embedding: nn.Embedding) -> nn.Linear:
    """Return an output layer for a language model (no bias) that shares the weight of the embedding.

    Raises:
        EmbeddingError: if the embedding has sparse gradients, which an output layer cannot have.
    """
    if embedding.sparse:
        raise EmbeddingError(
            f"an embedding of {embedding.num_embeddings:,} rows with sparse=True cannot be tied: the output layer "
            "uses all rows in every step; load it with sparse=False"
        )
    output = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
    output.weight = embedding.weight
    return output


def _table_of(source: str | Path | Subset, vocabulary: Any, options: dict[str, Any]) -> Table:
    if isinstance(source, Subset):
        if vocabulary is not None:
            raise EmbeddingError(f"the subset {source.facts.folder} already has words: leave out vocabulary")
        return _unchanged(source.table, options)
    if vocabulary is not None:
        return take_subset(source, vocabulary, **options).table
    opened = open_file(Path(source))
    if opened.format != "table" or opened.source.packing:
        raise EmbeddingError(
            f"{opened.source.name} ({opened.title}) needs vocabulary=: give a tokenizer, a file with a word per line "
            "or the words; for all its words convert it first (`plimsoll embeddings convert`)"
        )
    return _unchanged(open_table(Path(source)), options)


def _unchanged(table: Table, options: dict[str, Any]) -> Table:
    if options:
        raise EmbeddingError(
            f"the rows of {table.path} exist already: leave out {', '.join(options)}, or give the original file "
            "and vocabulary="
        )
    return table
