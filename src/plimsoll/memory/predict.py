"""From a trace and a target to what the training will need there: how the target's allocators count is simulated.

On CUDA the peak is what the process takes of the card: the segments that torch's allocator reserves, over all steps in
order and within the card's limit, and the CUDA context. On the CPU it is private memory: what the C library's heap
keeps resident, the interpreter and the libraries, and what these take for their threads.

How sure an answer is: every part has a low and a high value, and so has the peak. ``traced`` bytes are those of known
storages, ``modelled`` ones follow from a model of an allocator or a library, ``assumed`` ones from a table, and
``measured`` ones were read from this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plimsoll.memory.allocator import caching, glibc
from plimsoll.memory.live import Column, Live, live_bytes
from plimsoll.records.allocator import AllocatorRules
from plimsoll.records.gpu import DeviceSpec
from plimsoll.records.heap import HeapRules
from plimsoll.records.prediction import Estimate, Holding, MemoryTimeline, Moment
from plimsoll.records.trace import Category, Trace

MOST_ROWS = 4000
_NUM_LARGEST = 10
