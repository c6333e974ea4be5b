"""A pass that is rehearsed once and stands for several alike: it is in the trace as often as it would have run.

    with stands_for(14):
        embed(a_slice)

A technique that does the same again and again, on slices of one size, needs the memory of one of them, and the time of
all. Rehearsing each would take as long as there are slices. Does NOT make storages: what each pass leaves must be made
by the caller, once for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from plimsoll.memory.recorder import Recorder


@contextmanager
def stands_for(num_passes: int) -> Iterator[None]:
    """Let the ops of the block be noted so many times by whoever records; without a recorder it does nothing."""
    recorders = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
    begins = [recorder.op_row + 1 for recorder in recorders]
    yield
    for recorder, begin in zip(recorders, begins, strict=True):
        recorder.note_again(begin, num_passes - 1)
