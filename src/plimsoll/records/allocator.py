"""The parameters of torch's CUDA caching allocator and of glibc's heap.

The CUDA defaults are those in torch 2.13: ``c10/core/AllocatorConfig.h`` (included in the wheel, ``torch/include``).
Comments below name the constants. `plimsoll.memory.allocator.options` reads changes from ``PYTORCH_CUDA_ALLOC_CONF``.
"""

from __future__ import annotations

from pydantic import Field

from plimsoll.records.base import Frozen

MIB = 1 << 20

_FIRST_INTERVAL, _NUM_INTERVALS = 20, 16  # kRoundUpPowerOfTwoStart = 2**20 bytes, kRoundUpPowerOfTwoIntervals


class AllocatorRules(Frozen):
    """The rounding of requests, the sizes of segments requested from the driver, and the rules for splitting blocks.

    ``max_split_bytes`` of ``None`` is torch's "unlimited". ``garbage_collection_threshold`` is a share of the limit, or
    ``None`` for "off". ``roundup_power2_divisions`` is one number for requests of all sizes, or 16 numbers: for
    requests under 2 MiB, under 4 MiB, ..., under 32 GiB, and larger. ``process_share`` is torch's
    `per_process_memory_fraction`. It does not affect the rounding: the code that creates an allocator multiplies the
    capacity of the device by this share to get the limit.
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
        """Return the number of steps per power of two for rounding a request of this size; 0 for no rounding."""
        if isinstance(self.roundup_power2_divisions, int):
            return self.roundup_power2_divisions
        interval = num_bytes.bit_length() - 1 - _FIRST_INTERVAL
        return self.roundup_power2_divisions[min(max(interval, 0), _NUM_INTERVALS - 1)]


_KIB, _MIB = 1 << 10, 1 << 20
_FAST_BYTES = 4 * _MIB
_NEVER_BYTES = 1 << 62


class HeapRules(Frozen):
    """The rules of glibc's heap: which blocks get their own mapping, and when freed memory returns to the system."""

    mmap_threshold_bytes: int = Field(default=128 * _KIB, ge=0)
    is_dynamic: bool = True
    """True if freeing a mapped block of up to 32 MiB raises the thresholds.

    The mmap threshold becomes the size of the block, and the trim threshold becomes twice this size.
    """
    trim_threshold_bytes: int = Field(default=128 * _KIB, ge=0)
    top_pad_bytes: int = Field(default=128 * _KIB, ge=0)
    num_cached_per_size: int = Field(default=7, ge=0)
    """How many freed chunks of each size the thread's cache keeps unmerged, for sizes up to 1,040 bytes."""
    page_bytes: int = Field(default=4096, ge=1)
    alignment_bytes: int = Field(default=64, ge=32)
    """The alignment of every block: torch allocates CPU tensors with ``posix_memalign(64)``."""
    build_threshold_bytes: int | None = Field(default=None, ge=0)
    """The mmap threshold while the model is built and sharded, before the first step; ``None``: the same as later."""
    trims_after_steps: bool = False
    """True if free pages are returned to the system after each step, as with ``malloc_trim(0)``."""

    @property
    def keeps_large(self) -> bool:
        """True if the process keeps freed blocks of more than 4 MiB, the mmap threshold of `FAST_HEAP`."""
        return not self.is_dynamic and self.mmap_threshold_bytes > _FAST_BYTES

    @property
    def gives_back(self) -> bool:
        """True if freed memory is ever returned to the system, which clears pages before they are used again."""
        return self.trims_after_steps or min(self.mmap_threshold_bytes, self.trim_threshold_bytes) < _NEVER_BYTES


FRESH_HEAP = HeapRules()
"""glibc's defaults, in a process that has not yet freed a large block."""

# Importing torch and transformers frees mapped blocks of up to 1.84 MiB, torch alone of up to 0.92 MiB.
_AFTER_IMPORTS_BYTES = 1_925_120

DEFAULT_HEAP = HeapRules(mmap_threshold_bytes=_AFTER_IMPORTS_BYTES, trim_threshold_bytes=2 * _AFTER_IMPORTS_BYTES)
"""glibc's defaults after torch and transformers have been imported."""

FAST_HEAP = HeapRules(mmap_threshold_bytes=_FAST_BYTES, trim_threshold_bytes=2 * _AFTER_IMPORTS_BYTES, is_dynamic=False)
"""Rules under which blocks of 4 MiB or more are mapped (``plimsoll.device.cpu.heap.FAST_BYTES``).

They are set after the imports and before the model is built.
"""

TIGHT_HEAP = HeapRules(mmap_threshold_bytes=128 * _KIB, trim_threshold_bytes=2 * _AFTER_IMPORTS_BYTES, is_dynamic=False)
"""Rules under which blocks of 128 KiB or more are mapped (``plimsoll.device.cpu.heap.TIGHT_BYTES``).

Like `FAST_HEAP`, they are set after the imports and before the model is built.
"""

KEPT_HEAP = HeapRules(mmap_threshold_bytes=_NEVER_BYTES, trim_threshold_bytes=_NEVER_BYTES, is_dynamic=False)
"""Rules under which no block is mapped and no freed memory is returned (``plimsoll.device.cpu.heap.keep_freed``)."""
