"""Word vectors as a ``torch.nn.Embedding``, whose memory is the cached file until something is written to it.

The file is mapped copy-on-write: opening it takes a millisecond, processes that use the same vectors share its pages,
and a page becomes memory of the process when it is first written to. Frozen vectors stay in the file; of vectors that
are trained with sparse gradients, only the pages of rows that were used leave it. ``.to(device)`` copies straight from
the file. A limit on private memory (RLIMIT_DATA) counts the mapping in full all the same.
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
    """Make an ``nn.Embedding`` on the host, in training mode; move it with the model when that is moved.

    Args:
        source: a file of word vectors, or a subset that was taken from one.
        vocabulary: the words of the rows, as `plimsoll.embeddings.subset` takes them; ``None`` for a subset, and for a
            table that Plimsoll wrote, whose rows are used as they are.
        trainable: whether the vectors get gradients.
        sparse: whether gradients are sparse, for ``SparseAdam``, ``Adagrad`` and ``SGD``.
        dtype: of the weights, such as ``torch.float16`` or ``"fp16"``; ``None``: as they are kept. Another one
            than that takes a copy in memory.
        **options: how the subset is made, as `plimsoll.embeddings.subset` takes it.

    Raises:
        EmbeddingError: as `plimsoll.embeddings.subset`, or if a vocabulary is needed or not needed.
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
    """Make the output layer of a language model (no bias) that has the embedding's weight as its own.

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
            raise EmbeddingError(f"the subset {source.facts.folder} has its words: leave out vocabulary")
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
            f"the rows of {table.path} are made already: leave out {', '.join(options)}, or give the file they are "
            "from and vocabulary="
        )
    return table
