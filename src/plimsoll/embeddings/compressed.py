"""Compression of word vectors by product quantization or low-rank factorization, with a report of the error.

Both are lossy. Product quantization (Jegou et al. 2011, doi:10.1109/TPAMI.2010.57) splits vectors into parts and stores
for each part the index of the nearest of 256 centroids, one byte. Low-rank factorization stores the best rank-r
approximation (Eckart and Young 1936) as two matrices, like ALBERT's embedding (arXiv:1909.11942). It can be trained.
The error is reported as the cosine between the original and the compressed row. Does NOT train the compressed vectors.

Shapes: V rows, D numbers per vector, P parts, C centroids, R rank.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.embeddings.subsets import Subset
from plimsoll.errors import EmbeddingError
from plimsoll.files.store import Progress, silent
from plimsoll.records.embeddings import CompressionFacts

_CENTROIDS = 256  # the number of values of a byte
_ITERATIONS = 10
_SAMPLED_ROWS = 1 << 15
_BLOCK_ROWS = 4096


class ProductQuantizedEmbedding(nn.Module):
    """A frozen embedding: byte ``codes`` (V, P) select ``centroids`` (P, C, D / P)."""

    codes: Tensor
    centroids: Tensor

    def __init__(self, codes: Tensor, centroids: Tensor, padding_idx: int | None = None) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("centroids", centroids)
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = len(codes), centroids.shape[0] * centroids.shape[2]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (..., D) of ids (...)."""
        codes_P = self.codes[ids].long()
        vectors = self.centroids[torch.arange(codes_P.shape[-1], device=ids.device), codes_P].flatten(-2)
        return vectors if self.padding_idx is None else vectors * (ids != self.padding_idx).unsqueeze(-1)


class FactorizedEmbedding(nn.Module):
    """An embedding of rank R, with V * R + R * D numbers in place of V * D."""

    def __init__(self, rows_VR: Tensor, directions_DR: Tensor, padding_idx: int | None = None) -> None:
        super().__init__()
        self.rows = nn.Embedding(len(rows_VR), rows_VR.shape[1], padding_idx, _weight=rows_VR)
        self.projection = nn.Linear(rows_VR.shape[1], directions_DR.shape[0], bias=False, device="meta")
        self.projection.weight = nn.Parameter(directions_DR)
        self.num_embeddings, self.embedding_dim = len(rows_VR), len(directions_DR)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (..., D) of ids (...)."""
        projected: Tensor = self.projection(self.rows(ids))
        return projected


def product_quantized(
    vectors: Subset | nn.Embedding | NDArray[Any],
    num_parts: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[ProductQuantizedEmbedding, CompressionFacts]:
    """Compress vectors by product quantization. The centroids are found by k-means over up to 32,768 sampled rows.

    Args:
        vectors: a subset, an embedding, or an array (V, D).
        num_parts: P, which is also the bytes per row; a divisor of D. ``None``: parts of about 4 numbers.
        seed: seed of the sampled rows and of k-means.
        progress: called with the stage ``"quantizing"``.

    Returns:
        the compressed embedding, and the sizes and errors.

    Raises:
        EmbeddingError: if D is not divisible by ``num_parts``, or there are fewer rows than centroids.
    """
    from scipy.cluster.vq import kmeans2, vq

    rows_VD, padding_idx, num_bytes = _rows_of(vectors)
    num_rows, dimension = rows_VD.shape
    num_parts = _num_parts(dimension, num_parts)
    if num_rows < _CENTROIDS:
        raise EmbeddingError(f"{num_rows} rows are fewer than {_CENTROIDS} centroids: keep them as they are")
    generator = np.random.default_rng(seed)
    sample = np.sort(generator.permutation(num_rows)[:_SAMPLED_ROWS])
    length = dimension // num_parts
    centroids = np.empty((num_parts, _CENTROIDS, length), np.float32)
    codes = np.empty((num_rows, num_parts), np.uint8)
    for part in range(num_parts):
        columns = slice(part * length, (part + 1) * length)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "One of the clusters is empty")  # a centroid may have no rows
            centroids[part], _ = kmeans2(
                rows_VD[sample, columns].astype(np.float32), _CENTROIDS, _ITERATIONS, minit="points", rng=generator
            )
        for begin in range(0, num_rows, _BLOCK_ROWS):
            block = rows_VD[begin : begin + _BLOCK_ROWS, columns].astype(np.float32)
            codes[begin : begin + _BLOCK_ROWS, part] = vq(block, centroids[part], check_finite=False)[0]
        progress("quantizing", part + 1, num_parts)
    module = ProductQuantizedEmbedding(torch.from_numpy(codes), torch.from_numpy(centroids), padding_idx)
    return module, _facts("product quantization", f"{num_parts} parts", rows_VD, num_bytes, module)


def low_rank(vectors: Subset | nn.Embedding | NDArray[Any], rank: int) -> tuple[FactorizedEmbedding, CompressionFacts]:
    """Factorize vectors (V, D) into matrices (V, R) and (R, D), whose product is the best approximation of rank R.

    Args:
        vectors: a subset, an embedding, or an array (V, D).
        rank: R, less than D.

    Returns:
        the compressed embedding, and the sizes and errors.

    Raises:
        EmbeddingError: if the rank is less than 1, or saves no memory.
    """
    rows_VD, padding_idx, num_bytes = _rows_of(vectors)
    num_rows, dimension = rows_VD.shape
    if rank < 1 or rank * (num_rows + dimension) >= num_rows * dimension:
        most = (num_rows * dimension - 1) // (num_rows + dimension)
        raise EmbeddingError(
            f"rank {rank} saves no memory for {num_rows:,} vectors of {dimension} numbers: give a rank from 1 to {most}"
        )
    squares_DD = np.zeros((dimension, dimension))
    for begin in range(0, num_rows, _BLOCK_ROWS):
        block = rows_VD[begin : begin + _BLOCK_ROWS].astype(np.float64)
        squares_DD += block.T @ block
    directions_DR = np.linalg.eigh(squares_DD)[1][:, ::-1][:, :rank].astype(np.float32)
    rows_VR = np.empty((num_rows, rank), np.float32)
    for begin in range(0, num_rows, _BLOCK_ROWS):
        rows_VR[begin : begin + _BLOCK_ROWS] = rows_VD[begin : begin + _BLOCK_ROWS].astype(np.float32) @ directions_DR
    directions = torch.from_numpy(np.ascontiguousarray(directions_DR))
    module = FactorizedEmbedding(torch.from_numpy(rows_VR), directions, padding_idx)
    return module, _facts("low-rank factorization", f"rank {rank}", rows_VD, num_bytes, module)


def _rows_of(vectors: Subset | nn.Embedding | NDArray[Any]) -> tuple[NDArray[Any], int | None, int]:
    """Return the vectors (V, D), the index of the padding row, and the bytes of the uncompressed vectors.

    The index is ``None`` if the vectors have no padding row.
    """
    if isinstance(vectors, nn.Embedding):
        rows, padding_idx = vectors.weight.detach().cpu().float().numpy(), vectors.padding_idx
        num_bytes = vectors.weight.nbytes
    else:
        rows, padding_idx = (vectors.rows, vectors.table.padding) if isinstance(vectors, Subset) else (vectors, None)
        num_bytes = rows.nbytes
    if rows.ndim != 2 or not rows.any():
        what = "are not a matrix" if rows.ndim != 2 else "are all zeros"
        raise EmbeddingError(f"vectors of shape {rows.shape} {what}: give an array (rows, numbers) that is not empty")
    return rows, padding_idx, num_bytes


def _num_parts(dimension: int, asked: int | None) -> int:
    divisors = [number for number in range(1, dimension + 1) if dimension % number == 0]
    if asked is None:
        return min(divisors, key=lambda number: abs(dimension / number - 4))
    if asked not in divisors:
        raise EmbeddingError(
            f"{dimension} numbers cannot be split into {asked} equal parts: give one of {', '.join(map(str, divisors))}"
        )
    return asked


@torch.no_grad()
def _facts(method: str, detail: str, rows_VD: NDArray[Any], num_bytes: int, module: nn.Module) -> CompressionFacts:
    cosines = []
    for begin in range(0, len(rows_VD), _BLOCK_ROWS):
        before = torch.from_numpy(rows_VD[begin : begin + _BLOCK_ROWS].astype(np.float32))
        after = module(torch.arange(begin, begin + len(before)))
        is_vector = before.any(dim=1)
        cosines.append(torch.cosine_similarity(before[is_vector], after[is_vector]).numpy())
    cosine = np.concatenate(cosines)
    return CompressionFacts(
        method=method,
        detail=detail,
        num_rows=len(rows_VD),
        dimension=rows_VD.shape[1],
        num_bytes_before=num_bytes,
        num_bytes_after=sum(tensor.nbytes for tensor in module.state_dict().values()),
        mean_cosine=float(cosine.mean()),
        low_cosine=float(np.quantile(cosine, 0.01)),
        least_cosine=float(cosine.min()),
    )
