"""The blocks to checkpoint: the subset with the least recomputation under a memory bound, by an integer program.

    minimise    sum of recompute_seconds[i] over the chosen blocks i
    such that   for every block b:  saved_bytes[b] + sum over i < b of the bytes that block i keeps  <=  free_bytes

A block keeps ``kept_bytes`` if it is chosen, and ``saved_bytes`` if not. The constraint is the memory when the backward
pass of block b begins, with all activations of b in memory, saved or recomputed. It is a small version of
https://arxiv.org/abs/1910.02653. HiGHS solves it to the optimum through ``scipy.optimize.milp``; a model has tens of
blocks.

Does not see memory inside a block or outside all blocks (logits). A combination with the chosen blocks is traced again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TIGHTER = 1e-6  # share of the free bytes, subtracted if a solution exceeds these by the solver's tolerance
_MOST_TRIES = 8


def choose_blocks(
    saved_bytes: Sequence[int], recompute_seconds: Sequence[float], kept_bytes: Sequence[int], free_bytes: int
) -> tuple[int, ...] | None:
    """Return the indices of the blocks to checkpoint; ``None`` if checkpointing all blocks does not free enough memory.

    Args:
        saved_bytes: bytes that each block saves for backward, in the order of the forward pass.
        recompute_seconds: seconds to run each block forward again, 0 or more.
        kept_bytes: bytes that each block keeps if it is checkpointed.
        free_bytes: bytes available for the activations of all blocks.
    """
    num_blocks = len(saved_bytes)
    saved, kept = np.asarray(saved_bytes, dtype=np.int64), np.asarray(kept_bytes, dtype=np.int64)
    gains = np.maximum(saved - kept, 0)
    need = np.cumsum(saved)  # when the backward of each block begins, without checkpointing
    earlier = np.tril(np.ones((num_blocks, num_blocks), dtype=np.int64), -1)
    if num_blocks == 0 or (need <= free_bytes).all():
        return ()
    if (need - earlier @ gains > free_bytes).any():
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second, saved without checkpointing

    can_help = (gains > 0) & (np.arange(num_blocks) < num_blocks - 1)  # no backward comes before the last block's
    scale = max(int(need[-1]), 1)
    seconds = np.asarray(recompute_seconds, dtype=float)
    for tries in range(_MOST_TRIES):
        free_share = free_bytes / scale * (1 - tries * _TIGHTER)
        solution = milp(
            seconds / (seconds.max() or 1.0),
            integrality=np.ones(num_blocks),
            bounds=Bounds(0, can_help),
            constraints=LinearConstraint(earlier * gains / scale, lb=need / scale - free_share),
            options={"mip_rel_gap": 0},
        )
        if solution.x is None:
            break
        chosen = np.round(solution.x).astype(np.int64)
        if (need - earlier @ (gains * chosen) <= free_bytes).all():
            return tuple(np.flatnonzero(chosen).tolist())
    return tuple(np.flatnonzero(can_help).tolist())  # known to fit; only the solver's tolerance is in the way
