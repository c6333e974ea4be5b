"""A test for steady growth of memory from step to step, despite the noise of an allocator.

The steps are divided into quarters. Memory must grow in all three transitions from the median of one quarter to the
median of the next. A jump (a batch longer than any before, an evaluation) is not steady growth, because it appears in
only one of these transitions. Noise puts four medians in ascending order once in 24 times, so the growth must also be
even and large enough.

Not handled: a heap that still fills is not distinguished from growth without end. A glibc heap grows for hundreds of
steps if text lengths change from batch to batch, although user code keeps no objects. `docs/explain.md` reports how
often such a heap is mistaken for steady growth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import median

from plimsoll.records.diagnosis import MemoryGrowth

_FEWEST_POINTS = 8
_MOST_POINTS = 128
_WARM_UP_SHARE, _FEWEST_WARM_UP_POINTS = 1 / 5, 3
_NUM_PARTS = 4
_LEAST_OF_LIKELY_SHARE = 2 / 3
_NOISE_BYTES, _NOISE_SHARE = 1 << 20, 0.02


def growth_of(points: Sequence[tuple[int, int]]) -> MemoryGrowth | None:
    """Estimate the growth of memory per step, and whether it is steady.

    It is steady if it exceeds the noise, and no rate from one quarter of the steps to the next is much below the
    estimate.

    Args:
        points: steps in ascending order, and the bytes in use after each.

    Returns:
        the growth, steady or not; ``None`` if fewer than 8 points are left after the warm-up.
    """
    kept = points[max(int(len(points) * _WARM_UP_SHARE), _FEWEST_WARM_UP_POINTS) :]
    if len(kept) < _FEWEST_POINTS:
        return None
    parts = [kept[len(kept) * part // _NUM_PARTS : len(kept) * (part + 1) // _NUM_PARTS] for part in range(_NUM_PARTS)]
    middles = [(median(step for step, _ in part), median(used for _, used in part)) for part in parts]
    rates = [
        (used - used_before) / (step - step_before) for (step_before, used_before), (step, used) in pairwise(middles)
    ]
    likely = theil_sen(kept)
    risen_bytes = likely * (kept[-1][0] - kept[0][0])
    noise_bytes = max(_NOISE_BYTES, _NOISE_SHARE * median(used for _, used in kept))
    return MemoryGrowth(
        likely_bytes=round(likely),
        low_bytes=round(min(rates)),
        high_bytes=round(max(rates)),
        first_step=kept[0][0],
        last_step=kept[-1][0],
        is_steady=risen_bytes >= noise_bytes and min(rates) >= _LEAST_OF_LIKELY_SHARE * likely,
    )


def theil_sen(points: Sequence[tuple[float, int]]) -> float:
    """Return the median slope between all pairs of points, an estimate of growth that outliers hardly affect.

    Source: Theil-Sen, https://doi.org/10.1007/978-94-011-2546-8_20.
    """
    stride = -(-len(points) // _MOST_POINTS)
    return median((later[1] - one[1]) / (later[0] - one[0]) for one, later in combinations(points[::stride], 2))
