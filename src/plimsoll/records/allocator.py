"""The numbers that torch's caching allocator for CUDA works with.

The defaults are torch 2.13's: ``c10/core/AllocatorConfig.h`` (as shipped in the wheel, ``torch/include``), where the
constant of each is named below. `plimsoll.memory.allocator.options` reads them from ``PYTORCH_CUDA_ALLOC_CONF``.
"""

from __future__ import annotations

from pydantic import Field

from plimsoll.records.base import Frozen

MIB = 1 << 20

_FIRST_INTERVAL, _NUM_INTERVALS = 20, 16  # kRoundUpPowerOfTwoStart = 2**20 bytes, kRoundUpPowerOfTwoIntervals


class AllocatorRules(Frozen):
    """What the allocator rounds to, how large the segments are that it asks the driver for, and when it splits.

    ``max_split_bytes`` of None is torch's "unlimited", ``garbage_collection_threshold`` of None its "off" (a share of
    the limit). ``roundup_power2_divisions`` is one number for all sizes, or 16: for requests up to 2 MiB, to 4 MiB,
    ... , from 32 GiB. ``process_share`` is `per_process_memory_fraction`: it changes no size; who makes an allocator
    multiplies the capacity by it to get the limit.
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

    def divisions(self, num_bytes: int) -> int:
        """Return into how many steps a power of two is divided for a request of this size; 0 for no such rounding."""
        if isinstance(self.roundup_power2_divisions, int):
            return self.roundup_power2_divisions
        interval = num_bytes.bit_length() - 1 - _FIRST_INTERVAL
        return self.roundup_power2_divisions[min(max(interval, 0), _NUM_INTERVALS - 1)]


_KIB, _MIB = 1 << 10, 1 << 20
_FAST_BYTES = 4 * _MIB
_NEVER_BYTES = 1 << 62


class HeapRules(Frozen):
    """From which size a block is a mapping of its own, and when the top of the heap goes back to the system."""

    mmap_threshold_bytes: int = Field(default=128 * _KIB, ge=0)
    is_dynamic: bool = True
    """Whether the free of a larger mapped block, up to 32 MiB, raises the thresholds to its size and to twice that."""
    trim_threshold_bytes: int = Field(default=128 * _KIB, ge=0)
    top_pad_bytes: int = Field(default=128 * _KIB, ge=0)
    num_cached_per_size: int = Field(default=7, ge=0)
    """Freed chunks of up to 1,040 bytes that the thread's cache keeps from being joined with their neighbours."""
    page_bytes: int = Field(default=4096, ge=1)
    alignment_bytes: int = Field(default=64, ge=32)
    """Of every block: torch asks for its CPU tensors with ``posix_memalign(64)``."""
    build_threshold_bytes: int | None = Field(default=None, ge=0)
    """``mmap_threshold_bytes`` until the first step, where that is another: while a model is built and shared out."""
    trims_after_steps: bool = False
    """Whether the free pages go back to the system after each training step, as with ``malloc_trim(0)``."""

    @property
    def keeps_large(self) -> bool:
        """Whether freed blocks stay the process's that are larger than those that a budget's default keeps."""
        return not self.is_dynamic and self.mmap_threshold_bytes > _FAST_BYTES

    @property
    def gives_back(self) -> bool:
        """Whether freed memory goes back to the system at all, to be cleared by it when it is asked for again."""
        return self.trims_after_steps or min(self.mmap_threshold_bytes, self.trim_threshold_bytes) < _NEVER_BYTES


FRESH_HEAP = HeapRules()
"""glibc's own, in a process that has freed nothing large yet."""

# Importing torch and transformers frees mapped blocks, the largest of 1.84 MiB; torch alone ends at 0.92 MiB.
_AFTER_IMPORTS_BYTES = 1_925_120

DEFAULT_HEAP = HeapRules(mmap_threshold_bytes=_AFTER_IMPORTS_BYTES, trim_threshold_bytes=2 * _AFTER_IMPORTS_BYTES)
"""glibc's own, with torch and transformers imported."""

FAST_HEAP = HeapRules(mmap_threshold_bytes=_FAST_BYTES, trim_threshold_bytes=2 * _AFTER_IMPORTS_BYTES, is_dynamic=False)
"""Blocks from 4 MiB are mapped (``plimsoll.device.cpu.heap.FAST_BYTES``), set after the imports and before the model.
"""

TIGHT_HEAP = HeapRules(mmap_threshold_bytes=128 * _KIB, trim_threshold_bytes=2 * _AFTER_IMPORTS_BYTES, is_dynamic=False)
"""Blocks from 128 KiB are mapped (``plimsoll.device.cpu.heap.TIGHT_BYTES``), set at the same time."""

KEPT_HEAP = HeapRules(mmap_threshold_bytes=_NEVER_BYTES, trim_threshold_bytes=_NEVER_BYTES, is_dynamic=False)
"""No block is mapped, and what is freed stays the process's (``plimsoll.device.cpu.heap.keep_freed``)."""
