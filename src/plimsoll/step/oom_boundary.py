"""The only place that catches an out-of-memory error.

`attempt` runs a function. If memory runs out it returns an `OomEvent`, which holds only numbers and text. The
``except`` block has ended by then. So the exception and its traceback, whose frames held tensors, are freed
(https://docs.pytorch.org/docs/stable/notes/faq.html, "My out of memory exception handler can't allocate memory"). Every
other exception passes through unchanged.

The backend decides which errors mean out of memory: by a specific exception type if it has one, otherwise by the error
text. Library errors that can hide an out-of-memory error (cuDNN, cuBLAS, oneDNN) count only while the device is nearly
full.

Not handled: a process that is killed (see `plimsoll.training.supervise`). Nothing is undone; that is the caller's task.
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
    """The position of the run, for error messages; ``step`` counts completed steps.

    ``micro_batch`` is the current micro-batch size in samples; ``None`` before the first micro-batch. ``samples`` are
    the indices, within the batch, of the samples that an evaluation is processing.
    """

    step: int = 0
    phase: Phase = "fetch"
    micro_batch: int | None = None
    samples: Sequence[int] = ()


def attempt(work: Callable[[], T], backend: Backend, position: Position) -> T | OomEvent:
    """Run ``work`` and return its result, or an event if memory ran out in it.

    The caller frees tensors that the failed work left. No reference to them remains here.
    """
    try:
        return work()
    except BaseException as error:
        family = _family(error, backend)
        if family is None:
            raise
        event = _event(error, family, backend, position)
        # A debugger or a reference cycle may keep the exception alive, but the tensors in its frames must be freed.
        traceback.clear_frames(error.__traceback__)
    return event


def attempt_twice(work: Callable[[], T], backend: Backend, position: Position) -> T | OomEvent:
    """Run ``work``, which must be repeatable. If memory runs out, free cached memory and run it again."""
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
    """Run ``work``, which cannot be done in less memory, and raise a clear error if it does not fit.

    Args:
        work: the function to run.
        backend: the backend of the device that provides the memory.
        what: a description of the work for the message, as in "building the model".
        otherwise: another remedy, appended to "give a larger budget".

    Raises:
        OutOfMemoryError: if memory ran out.
    """
    outcome = attempt(work, backend, Position())
    if isinstance(outcome, OomEvent):
        raise OutOfMemoryError(f"memory ran out while {what} ({outcome.shortage}): give a larger budget{otherwise}")
    return outcome


def without_fail(work: Callable[[], T], *raised: type[Exception]) -> T | str:
    """Run a function whose failure must not hide another error. Return its result, or its error message if it fails.

    Errors of the types in ``raised`` are raised.
    """
    try:
        return work()
    except raised:
        raise
    except Exception as error:  # noqa: BLE001 - memory is short, and the original error must be shown
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
    if isinstance(error, PeerOutOfMemory):  # memory use on this rank does not explain it
        return event.model_copy(update={"rank": error.rank})
    use = backend.use()
    used = {"live_bytes": use.used_bytes, "reserved_bytes": use.reserved_bytes, "capacity_bytes": use.limit_bytes}
    return event.model_copy(update=used)
