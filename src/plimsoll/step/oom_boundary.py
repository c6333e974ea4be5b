"""The only place that catches an out-of-memory error.

`attempt` runs a piece of work. If memory runs out it returns an `OomEvent`, plain numbers and text, and by then the
``except`` block has been left: the exception is gone, and with it the traceback whose frames held the tensors
(https://docs.pytorch.org/docs/stable/notes/faq.html, "My out of memory exception handler can't allocate memory").
Every other exception passes through unchanged.

What counts as out of memory is the backend's business: by type where there is one, by text where there is not, and
library errors that hide one (cuDNN, cuBLAS, oneDNN) only while the device is nearly full.

Does NOT cover a process that is killed (see `plimsoll.training.supervise`) and does not undo anything: that is the
caller's.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from plimsoll.device.base import Backend
from plimsoll.device.oom_errors import requested_bytes
from plimsoll.distributed.ranks import PeerOutOfMemory
from plimsoll.errors import OutOfMemoryError, PlimsollError
from plimsoll.records.run import PHASES_OF_A_STEP, OomEvent, Phase

T = TypeVar("T")

_LONGEST_TEXT = 2000  # characters of the raw error kept in the record; CUDA's longest messages have about 900


@dataclass(slots=True)
class Position:
    """Where the run is, so that an error can say where it happened; ``step`` counts the finished steps.

    ``samples`` are the numbers, in its batch, of the samples that are being evaluated.
    """

    step: int = 0
    phase: Phase = "fetch"
    micro_batch: int | None = None
    samples: Sequence[int] = ()


def attempt(work: Callable[[], T], backend: Backend, position: Position) -> T | OomEvent:
    """Run ``work`` and return its result, or the event if memory ran out in it.

    The caller frees what the work left behind: nothing of it is referenced from here any more.
    """
    try:
        return work()
    except BaseException as error:
        family = _family(error, backend)
        if family is None:
            raise
        event = _event(error, family, backend, position)
        # A debugger or a reference cycle may keep the exception alive; what its frames held must go all the same.
        traceback.clear_frames(error.__traceback__)
    return event


def attempt_twice(work: Callable[[], T], backend: Backend, position: Position) -> T | OomEvent:
    """Run ``work``, which may be begun again: once more where memory runs out, after what is cached is given back."""
    outcome = attempt(work, backend, position)
    if isinstance(outcome, OomEvent):
        backend.release()
        outcome = attempt(work, backend, position)
    return outcome


def _family(error: BaseException, backend: Backend) -> str | None:
    if isinstance(error, PeerOutOfMemory):
        return error.family
    return None if isinstance(error, PlimsollError) else backend.oom_family(error)


def fitting(work: Callable[[], T], backend: Backend, what: str, otherwise: str = " or a smaller model") -> T:
    """Run ``work``, which cannot be done in less memory; where it does not fit, say so.

    Args:
        work: what is done.
        backend: of the device that has the memory.
        what: what is done, as in "while building the model".
        otherwise: what follows "give a larger budget", as another remedy.

    Raises:
        OutOfMemoryError: if memory ran out.
    """
    outcome = attempt(work, backend, Position())
    if isinstance(outcome, OomEvent):
        raise OutOfMemoryError(f"memory ran out while {what} ({outcome.shortage}): give a larger budget{otherwise}")
    return outcome


def without_fail(work: Callable[[], T], *raised: type[Exception]) -> T | str:
    """Run what explains an error and must not hide it; return its message where it fails itself, unless ``raised``."""
    try:
        return work()
    except raised:
        raise
    except Exception as error:  # noqa: BLE001 - memory is short, and the error that is explained must be seen
        return f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]


def _event(error: BaseException, family: str, backend: Backend, position: Position) -> OomEvent:
    text = str(error)
    event = OomEvent(
        step=position.step + (position.phase in PHASES_OF_A_STEP),
        phase=position.phase,
        family=family,
        requested_bytes=requested_bytes(text),
        micro_batch=position.micro_batch,
        raw_text=f"{type(error).__name__}: {text}"[:_LONGEST_TEXT],
    )
    if isinstance(error, PeerOutOfMemory):  # what is in use here says nothing of that rank
        return event.model_copy(update={"rank": error.rank})
    use = backend.use()
    used = {"live_bytes": use.used_bytes, "reserved_bytes": use.reserved_bytes, "capacity_bytes": use.limit_bytes}
    return event.model_copy(update=used)
