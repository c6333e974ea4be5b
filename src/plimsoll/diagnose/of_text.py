"""The diagnosis of an error's text or of a log: the last out-of-memory error in it, and what its numbers say.

What would fix it is said where the numbers bound it: what other processes hold, what the allocator holds and cannot
use, what is missing. Does NOT know the training that failed, so it says nothing of techniques.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

from plimsoll.diagnose.parse.event import event_of
from plimsoll.diagnose.parse.log import Log, read_log
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.oom_text import OomText
from plimsoll.records.units import format_bytes


def diagnosis_of_text(file: BinaryIO, subject: str, report: Callable[[int], None] = lambda _: None) -> Diagnosis:
    """Read a text or a log to its end and explain the last out-of-memory error in it.

    Args:
        file: of bytes.
        subject: what it is called.
        report: called now and then with how many characters were read.
    """
    log = read_log(file, report)
    event = log.last or event_of(log.tail)
    return Diagnosis(subject=subject, event=event, notes=tuple(_notes(event, log)))


def _notes(event: OomText, log: Log) -> list[str]:
    if not event.is_oom:
        return [f"No text that means out of memory was found in {log.num_lines:,} line{'s' * (log.num_lines != 1)}."]
    notes = [_LIKELY[event.likely_cause or "unknown"](event)]
    others = len(log.events) - 1
    if others > 0:
        stand = "error stands" if others == 1 else "errors stand"
        notes.append(f"{others:,} other out-of-memory {stand} above the last one.")
    return notes


def _size(num_bytes: int | None) -> str:
    return "an unknown size" if num_bytes is None else format_bytes(num_bytes)


def _true_capacity(event: OomText) -> str:
    if event.tried_to_allocate is None or event.free is None:
        return "The device is full: smaller micro-batches or one of Plimsoll's techniques free memory on it."
    missing_bytes = event.tried_to_allocate - event.free
    return (
        f"The device is full: {format_bytes(max(0, missing_bytes))} more than is free was asked for. `plimsoll plan "
        "job.yaml --budget SIZE` finds what makes the training fit."
    )


def _fragmentation(event: OomText) -> str:
    return (
        f"PyTorch holds {_size(event.derived_reserved_unallocated)} that it does not use, and no piece of it has the "
        f"{_size(event.tried_to_allocate)} that were asked for. Set PYTORCH_ALLOC_CONF=expandable_segments:True "
        "(before torch 2.9 PYTORCH_CUDA_ALLOC_CONF): it frees at most that much."
    )


def _other_process(event: OomText) -> str:
    held = (
        "Other processes hold the device's memory"
        if event.other_process is None
        else (f"Other processes hold {format_bytes(event.other_process)} of the device's memory")
    )
    return f"{held}: `nvidia-smi` lists them; stop them, or give a budget that leaves them room."


def _absurd_request(event: OomText) -> str:
    return (
        f"{_size(event.tried_to_allocate)} were asked for in one piece, more than the device has: look at the shapes "
        "of the line that failed before anything else; dimensions may be swapped, or one of them far too long."
    )


def _host_ram(event: OomText) -> str:
    asked = "" if event.tried_to_allocate is None else f" when {format_bytes(event.tried_to_allocate)} were asked for"
    return (
        f"The host's memory, or the limit of its control group, ran out{asked}. `plimsoll train --budget SIZE` keeps a "
        "training under a limit; data larger than memory is read from files (`plimsoll data index`)."
    )


def _tiny_shm(event: OomText) -> str:
    return (
        "Shared memory ran out, through which the workers of a DataLoader hand over batches: give the container more "
        "(`docker run --shm-size=8g`, or an emptyDir of medium Memory at /dev/shm), or fewer workers."
    )


def _unknown(event: OomText) -> str:
    if event.free is not None and event.tried_to_allocate is not None:
        return (
            f"{format_bytes(event.free)} were free when {format_bytes(event.tried_to_allocate)} were asked for, so the "
            "text does not say why it failed: another process may have held the memory for a moment, or one piece of "
            "that size was not to be had."
        )
    return "The text states no sizes, so it does not say what used the memory: look for an earlier message with sizes."


_LIKELY: dict[str, Callable[[OomText], str]] = {
    "true_capacity": _true_capacity,
    "fragmentation": _fragmentation,
    "other_process": _other_process,
    "absurd_request": _absurd_request,
    "host_ram": _host_ram,
    "tiny_shm": _tiny_shm,
    "unknown": _unknown,
}
