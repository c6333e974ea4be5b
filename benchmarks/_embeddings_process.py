"""Train a memory-mapped table inside a limit on private memory, and print one JSON object; used by
`embeddings_host.py`.

python benchmarks/_embeddings_process.py KIND ROWS WIDTH LIMIT_MIB IDS STEPS ORDER FOLDER
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import plimsoll
from plimsoll.device import process
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.embeddings.host_optimizer import optimizer_of

KINDS = {"Adagrad": torch.optim.Adagrad, "SparseAdam": torch.optim.SparseAdam}
LR = 0.05


def zipf_batches(num_rows: int, num_ids: int, num_batches: int, order: str, seed: int = 0) -> list[Tensor]:
    """Draw ids with Zipf frequencies: rank r is row r, or a row anywhere in the table if ``order`` is ``scattered``."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(num_batches, num_ids, generator=generator, dtype=torch.float64)
    ranks = (num_rows + 1.0) ** uniform
    ids = (ranks.long() - 1).clamp(0, num_rows - 1)
    scattered = ids * 2_654_435_761 % num_rows  # a prime, so no two ranks share a row
    return list(scattered if order == "scattered" else ids)


def loss_of(table: nn.Module, ids: Tensor) -> Tensor:
    """Compute a loss in which each row learns one number, so that the table dominates the time."""
    return (table(ids).mean(-1) - torch.sin(ids.float())).square().mean()


def small(block: Tensor) -> Tensor:
    """Initialize rows with a cheap uniform distribution."""
    return block.uniform_(-0.1, 0.1)


def main() -> None:
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    kind, (num_rows, width, limit_mib, num_ids, num_steps), folder = sys.argv[1], map(int, sys.argv[2:7]), sys.argv[8]
    batches = zipf_batches(num_rows, num_ids, num_steps, sys.argv[7])
    peak, peaks_bytes = process.PeakCounter(), []
    with plimsoll.limited(limit_mib << 20):
        started = time.perf_counter()
        table = HostEmbedding(num_rows, width, path=Path(folder) / "table", initialize=small)
        optimizer = optimizer_of(table, KINDS[kind], lr=LR)
        made_seconds = time.perf_counter() - started
        step = plimsoll.TrainStep(table, optimizer, loss_of, units="samples")
        losses, seconds = [], []
        for ids in table.prefetched(batches, ids=lambda ids: ids, optimizer=optimizer):
            peak.reset()  # every step: table pages that are touched later would be subtracted from the peak
            started = time.perf_counter()
            losses.append(step(ids).loss)
            seconds.append(time.perf_counter() - started)
            peaks_bytes.append(peak.read(process.private_bytes()))
    result = {
        "peak_bytes": max(peaks_bytes),
        "table_bytes": table.weight.nbytes,
        "made_seconds": made_seconds,
        "steps_per_second": len(seconds) / sum(seconds),
        "median_steps_per_second": 1 / sorted(seconds)[len(seconds) // 2],
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
