"""The settings of the C library's heap, as a value: what `mallopt` sets, and what glibc has without it.

Source: mallopt(3) and malloc/malloc.c of glibc 2.36 (``do_set_mmap_threshold``, ``__libc_free``). Setting a threshold
ends its raising for good; `plimsoll.device.heap` sets both, to what glibc's own have become after the imports.
"""

from __future__ import annotations

from pydantic import Field

from plimsoll.records.base import Frozen

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
"""Blocks from 4 MiB are mapped (``plimsoll.device.heap.FAST_BYTES``), set after the imports and before the model."""

TIGHT_HEAP = HeapRules(mmap_threshold_bytes=128 * _KIB, trim_threshold_bytes=2 * _AFTER_IMPORTS_BYTES, is_dynamic=False)
"""Blocks from 128 KiB are mapped (``plimsoll.device.heap.TIGHT_BYTES``), set at the same time."""

KEPT_HEAP = HeapRules(mmap_threshold_bytes=_NEVER_BYTES, trim_threshold_bytes=_NEVER_BYTES, is_dynamic=False)
"""No block is mapped, and what is freed stays the process's (``plimsoll.device.heap.keep_freed``)."""
