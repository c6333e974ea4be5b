"""The numbers that torch's caching allocator for CUDA works with.

The defaults are torch 2.13's: ``c10/core/AllocatorConfig.h`` (as shipped in the wheel, ``torch/include``), where the
constant of each is named below. `plimsoll.memory.allocator.options` reads them from ``PYTORCH_CUDA_ALLOC_CONF``.
"""

from __future__ import annotations

from plimsoll.records.base import Frozen

MIB = 1 << 20

_FIRST_INTERVAL, _NUM_INTERVALS = 20, 16  # kRoundUpPowerOfTwoStart = 2**20 bytes, kRoundUpPowerOfTwoIntervals


class AllocatorRules(Frozen):
    """What the allocator rounds to, how large the segments are that it asks the driver for, and when it splits.

    ``max_split_bytes`` of None is torch's "unlimited", ``garbage_collection_threshold`` of None its "off" (a share of
    the limit). ``roundup_power2_divisions`` is one number for all sizes, or 16: for requests up to 2 MiB, to 4 MiB,
    ... , from 32 GiB. ``process_share`` is `per_process_memory_fraction`: it changes no size; who makes an allocator
    multiplies the capacity by it to get the limit. Pinned host memory is rounded to a power of two up to
    ``pinned_max_round_bytes`` (None: always).
    """

    rounding_bytes: int = 512  # kMinBlockSize
    small_bytes: int = MIB  # kSmallSize: the largest request of the small pool
    small_segment_bytes: int = 2 * MIB  # kSmallBuffer
    large_segment_bytes: int = 20 * MIB  # large_segment_size_, for requests under min_large_bytes
    min_large_bytes: int = 10 * MIB  # kMinLargeAlloc
    round_large_bytes: int = 2 * MIB  # kRoundLarge
    max_split_bytes: int | None = None  # max_split_size_
    max_non_split_rounding_bytes: int = 20 * MIB  # max_non_split_rounding_size_
    roundup_power2_divisions: int | tuple[int, ...] = 0  # roundup_power2_divisions_
    garbage_collection_threshold: float | None = None  # garbage_collection_threshold_
    expandable_segments: bool = False  # use_expandable_segments_
    process_share: float = 1.0  # m_per_process_memory_fraction
    pinned_max_round_bytes: int | None = None  # the smaller of pinned_max_round_threshold_, pinned_max_cached_size_

    def divisions(self, num_bytes: int) -> int:
        """Return into how many steps a power of two is divided for a request of this size; 0 for no such rounding."""
        if isinstance(self.roundup_power2_divisions, int):
            return self.roundup_power2_divisions
        interval = num_bytes.bit_length() - 1 - _FIRST_INTERVAL
        return self.roundup_power2_divisions[min(max(interval, 0), _NUM_INTERVALS - 1)]
