"""Where native code ends the process because it is refused memory: the Python lines that led there, on standard error.

Rust's standard library (and so ``tokenizers``, ``safetensors`` and ``polars``) prints "memory allocation of N bytes
failed" and aborts; so do some C and C++ libraries. No exception comes of it, no handler written in Python runs any
more, and nothing can be undone: a limit cannot be made safe for such code, only larger. What can be had is the place:
`faulthandler` writes it from inside the signal handler, without allocating. ``plimsoll explain`` reads the text, and
``plimsoll train`` starts a new process.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_where() -> Iterator[None]:
    """Have an abort print where it happened while the block runs; a fault handler of the user's own stays."""
    if faulthandler.is_enabled() or sys.__stderr__ is None or sys.__stderr__.closed:
        yield
        return
    faulthandler.enable(sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.disable()
