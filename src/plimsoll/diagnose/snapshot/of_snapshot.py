"""The diagnosis of a memory snapshot: live memory at the peak by line, unused memory, leaks, and out-of-memory errors.

One device is explained: the device that ran out of memory, or else the device with the most reserved memory. A snapshot
does not contain the total memory of the card, the memory of other processes, or memory outside torch's allocator
(contexts, NCCL).
"""

from __future__ import annotations

from pathlib import Path

from plimsoll.diagnose.snapshot.leaks import leak_findings, step_ends
from plimsoll.diagnose.snapshot.read import Block, Snapshot, read_snapshot
from plimsoll.diagnose.snapshot.replay import FROM_BEFORE, Replay, replay, shares_at
from plimsoll.records.diagnosis import Diagnosis, Fact, Finding
from plimsoll.records.oom_text import LikelyCause, OomText
from plimsoll.records.units import format_bytes

_LEAST_UNUSED_BYTES = 64 << 20
_LEAST_UNUSED_SHARE = 0.2


def diagnosis_of_snapshot(path: Path) -> Diagnosis:
    """Read a snapshot and explain the memory of one device in it.

    Raises:
        InputError: if the file cannot be read, is not a snapshot, or contains anything but plain data.
    """
    snapshot = read_snapshot(path)
    replays = [replay(snapshot, device) for device in _devices(snapshot)]
    explained = max(replays, key=_importance)
    moment = explained.top_event if explained.oom_event is None else explained.oom_event
    findings = (*_fragmentation(explained, moment), *leak_findings(explained))
    return Diagnosis(
        subject=path.name,
        num_steps=len(step_ends(explained)),
        peak_bytes=_live_bytes(explained, moment),
        event=_event(explained),
        shares=shares_at(explained, moment),
        findings=tuple(sorted(findings, key=lambda finding: -(finding.effect_bytes or 0))),
        notes=tuple(_notes(explained, moment, len(replays))),
    )


def _devices(snapshot: Snapshot) -> list[int]:
    """Return the indices of the devices for which a snapshot has memory or events; ``[0]`` if it has neither."""
    used = {segment.device for segment in snapshot.segments}
    used |= {device for device, rows in enumerate(snapshot.traces) if rows}
    return sorted(used) or [0]


def _importance(replay: Replay) -> tuple[bool, int]:
    return replay.oom_event is not None, max(_at_end_bytes(replay), max(replay.reserved_bytes, default=0))


def _at_end_bytes(replay: Replay) -> int:
    return sum(segment.size_bytes for segment in replay.segments)


def _live_bytes(replay: Replay, moment: int) -> int:
    return replay.peak_bytes if moment == FROM_BEFORE else replay.live_bytes[moment]


def _reserved_bytes(replay: Replay, moment: int) -> int:
    """Return the bytes reserved after event ``moment``; for `FROM_BEFORE`, the bytes reserved after the first event."""
    return replay.reserved_bytes[max(0, moment)] if replay.rows else _at_end_bytes(replay)


def _event(replay: Replay) -> OomText | None:
    moment = replay.oom_event
    if moment is None:
        return None
    asked_bytes, site = replay.size_bytes(moment), replay.site(moment)
    free_bytes = replay.snapshot.columns.addresses[replay.rows[moment]]
    live_bytes, reserved_bytes = replay.live_bytes[moment], replay.reserved_bytes[moment]
    unused_bytes = _unused_bytes(replay, reserved_bytes, live_bytes)
    cause: tuple[LikelyCause, LikelyCause | None] = "true_capacity", "other_process"
    if asked_bytes > reserved_bytes + free_bytes:
        cause = "absurd_request", "other_process"
    elif unused_bytes >= asked_bytes:
        cause = "fragmentation", "true_capacity"
    return OomText(
        kind="cuda_snapshot",
        is_oom=True,
        tried_to_allocate=asked_bytes,
        free=free_bytes,
        allocated_by_pytorch=live_bytes,
        reserved_total=reserved_bytes,
        derived_reserved_unallocated=unused_bytes,
        device_index=replay.device,
        likely_cause=cause[0],
        likely_cause_alt=cause[1],
        place=site.place,
    )


def _holes(replay: Replay, is_private: bool) -> list[Block]:
    """Return the blocks that no tensor uses when the recording ends.

    Args:
        replay: the replayed events.
        is_private: whether to return the blocks of private pools, or of the common pool.
    """
    segments = [segment for segment in replay.segments if segment.is_private == is_private]
    return [block for segment in segments for block in segment.blocks if not block.is_used]


def _unused_bytes(replay: Replay, reserved_bytes: int, live_bytes: int) -> int:
    """Return the reserved bytes that any allocation could have used, but that were not in use.

    Unused memory of private pools is subtracted. It is only known for the end of the recording.
    """
    private_bytes = sum(hole.size_bytes for hole in _holes(replay, is_private=True))
    return max(0, reserved_bytes - live_bytes - private_bytes)


def _fragmentation(replay: Replay, moment: int) -> tuple[Finding, ...]:
    """Return a finding if the allocator held much unused memory.

    If memory ran out, the memory at that event counts, otherwise the memory at the peak.
    """
    if not replay.rows:
        return ()
    reserved_bytes = max(replay.reserved_bytes)
    unused_bytes = _unused_bytes(replay, reserved_bytes, replay.peak_bytes)
    least_bytes = max(_LEAST_UNUSED_BYTES, int(_LEAST_UNUSED_SHARE * reserved_bytes))
    evidence = [f"{format_bytes(reserved_bytes)} were reserved at most, {format_bytes(replay.peak_bytes)} used at most"]
    if replay.oom_event is not None:
        reserved_bytes = replay.reserved_bytes[moment]
        unused_bytes = _unused_bytes(replay, reserved_bytes, replay.live_bytes[moment])
        least_bytes = replay.size_bytes(moment)
        evidence = [
            f"{format_bytes(least_bytes)} were requested, and {format_bytes(unused_bytes)} of the "
            f"{format_bytes(reserved_bytes)} reserved were unused"
        ]
    if unused_bytes < max(1, least_bytes):
        return ()
    if replay.oom_event is not None and not _is_changed_after(replay, moment):
        largest_bytes = max((hole.size_bytes for hole in _holes(replay, is_private=False)), default=0)
        evidence.append(f"the largest unused block has {format_bytes(largest_bytes)}")
    is_expandable = replay.snapshot.settings.get("expandable_segments") is True
    return (
        Finding(
            cause="fragmentation",
            title=f"{format_bytes(unused_bytes)} are reserved in blocks that are not used",
            place=replay.site(moment).place if replay.oom_event is not None else "",
            evidence=tuple(Fact(text=text, known="counted") for text in evidence),
            remedy="use similar sizes in every step (a few length buckets), and free tensors kept between steps"
            if is_expandable
            else "let segments grow; before torch 2.9 the variable is PYTORCH_CUDA_ALLOC_CONF",
            code="" if is_expandable else "export PYTORCH_ALLOC_CONF=expandable_segments:True",
            effect_bytes=unused_bytes,
            effect_known="assumed",
        ),
    )


def _is_changed_after(replay: Replay, moment: int) -> bool:
    last = len(replay.rows) - 1
    return (replay.live_bytes[last], replay.reserved_bytes[last]) != (
        replay.live_bytes[moment],
        replay.reserved_bytes[moment],
    )


def _notes(replay: Replay, moment: int, num_devices: int) -> list[str]:
    live, reserved = (format_bytes(size(replay, moment)) for size in (_live_bytes, _reserved_bytes))
    when = "When memory ran out" if replay.oom_event is not None else "At the peak" if replay.rows else "At the end"
    notes = [f"{when} {live} were in use and {reserved} reserved on device {replay.device}."]
    if not replay.rows:
        notes.append("No events were recorded, so the peak and leaks are unknown: record with enabled='all'.")
    elif len(step_ends(replay)) < 4:
        notes.append("Leaks were not looked for: fewer than four steps of a torch optimizer were recorded.")
    if num_devices > 1:
        notes.append(f"{num_devices - 1} other device{'s' * (num_devices > 2)} in the snapshot: not explained here.")
    private = [segment for segment in replay.segments if segment.is_private]
    if private:
        unused = sum(hole.size_bytes for hole in _holes(replay, is_private=True))
        notes.append(
            f"Private pools (CUDA graphs, MemPool) have {format_bytes(sum(one.size_bytes for one in private))}, of "
            f"which {format_bytes(unused)} are unused, and not available to other allocations."
        )
    streams = {segment.stream for segment in replay.segments}
    if len(streams) > 1:
        notes.append(f"Memory is reserved for {len(streams)} streams; no stream can use memory that another one frees.")
    if replay.oom_event is not None:
        notes.append("A snapshot does not show the card's size and its use by other processes: run `nvidia-smi`.")
    return notes
