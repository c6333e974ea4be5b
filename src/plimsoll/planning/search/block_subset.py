"""Which blocks to checkpoint: the subset that recomputes least and stays under a line, by an integer program.

    minimise    sum of recompute_seconds[i] over the chosen blocks i
    such that   for every block b:  saved_bytes[b] + sum over i < b of what block i keeps  <=  free_bytes

where a block keeps ``saved_bytes`` if it is not chosen and ``kept_bytes`` if it is: the memory when b's backward
begins, with all of b's activations there, kept or recomputed (https://arxiv.org/abs/1910.02653 in small). Solved by
HiGHS through ``scipy.optimize.milp`` to the optimum; a model has tens of blocks.

Does NOT see what happens inside a block or beside them (logits): the plan is traced again with what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TIGHTER = 1e-6  # of the free bytes, taken off when a solution is over them by the solver's tolerance
_MOST_TRIES = 8


def choose_blocks(
    saved_bytes: Sequence[int], recompute_seconds: Sequence[float], kept_bytes: Sequence[int], free_bytes: int
) -> tuple[int, ...] | None:
    """Return the numbers of the blocks to checkpoint, or ``None`` if not even all of them are enough.

    Args:
        saved_bytes: what each block keeps for backward, in order of the forward pass.
        recompute_seconds: how long each takes to run forward again, 0 or more.
        kept_bytes: what stays of each if it is checkpointed.
        free_bytes: for the activations of all blocks.
    """
    num_blocks = len(saved_bytes)
    saved, kept = np.asarray(saved_bytes, dtype=np.int64), np.asarray(kept_bytes, dtype=np.int64)
    gains = np.maximum(saved - kept, 0)
    need = np.cumsum(saved)  # when the backward of each block begins, with nothing checkpointed
    earlier = np.tril(np.ones((num_blocks, num_blocks), dtype=np.int64), -1)
    if num_blocks == 0 or (need <= free_bytes).all():
        return ()
    if (need - earlier @ gains > free_bytes).any():
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second of a plan that checkpoints nothing

    can_help = (gains > 0) & (np.arange(num_blocks) < num_blocks - 1)  # nothing comes after the last one
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
    return tuple(np.flatnonzero(can_help).tolist())  # it is known to fit; only the solver's tolerance lies between
