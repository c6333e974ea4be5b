"""Lines of code whose allocations stay live from step to step.

A step ends at the first memory event of a torch optimizer after a forward or a backward pass. The steps between the
first and the last such event are examined. A line leaks if some of its allocations are live when the recording ends.
They must come from at least three of the steps, and from three quarters of them. Their total must be at least 1 MiB and
2 % of the peak. So allocations that happen once (parameters, states, caches), and allocations in the last, unfinished
step, are not leaks.

Not handled: programs without an optimizer step, fewer than three whole steps, and allocations whose stacks were not
recorded. The line is the place of the allocation; another line may keep it alive.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from plimsoll.diagnose.snapshot.recording import ALLOC
from plimsoll.diagnose.snapshot.replay import NEVER, Replay
from plimsoll.records.diagnosis import Fact, Finding
from plimsoll.records.units import format_bytes

_FEWEST_STEPS = 3
_SHARE_OF_STEPS = 3 / 4
_LEAST_BYTES = 1 << 20
_LEAST_SHARE = 0.02
_MOST_LINES = 3


@dataclass
class _Kept:
    """The allocations of one line that are live when the recording ends.

    Attributes:
        steps: the steps in which they were made.
        num_pieces: the number of these allocations.
        num_bytes: their total size.
    """

    steps: set[int] = field(default_factory=set)
    num_pieces: int = 0
    num_bytes: int = 0


def step_ends(replay: Replay) -> list[int]:
    """Return the numbers of the events at which training steps end.

    Each is the first event of an optimizer after a forward or a backward pass.
    """
    ends: list[int] = []
    is_training = False
    for event in range(len(replay.rows)):
        phase = replay.site(event).phase
        if phase in ("forward", "backward"):
            is_training = True
        elif phase == "optimizer" and is_training:
            ends.append(event)
            is_training = False
    return ends


def leak_findings(replay: Replay) -> tuple[Finding, ...]:
    """Return findings for the lines whose allocations stay live from step to step, largest first."""
    ends = step_ends(replay)
    num_steps = len(ends) - 1
    if num_steps < _FEWEST_STEPS:
        return ()
    least_bytes = max(_LEAST_BYTES, _LEAST_SHARE * replay.peak_bytes)
    leaks = [
        (kept.num_bytes, place, kept)
        for place, kept in _kept_by_place(replay, ends).items()
        if len(kept.steps) >= max(_FEWEST_STEPS, _SHARE_OF_STEPS * num_steps) and kept.num_bytes >= least_bytes
    ]
    leaks.sort(key=lambda leak: (-leak[0], leak[1]))
    return tuple(_finding(replay, place, kept, num_steps, len(leaks)) for _, place, kept in leaks[:_MOST_LINES])


def _kept_by_place(replay: Replay, ends: list[int]) -> dict[str, _Kept]:
    found: dict[str, _Kept] = defaultdict(_Kept)
    actions = replay.snapshot.columns.actions
    step = 0
    for event in range(ends[0] + 1, ends[-1]):
        if event == ends[step + 1]:
            step += 1
        if replay.freed_at[event] != NEVER or actions[replay.rows[event]] != ALLOC:
            continue
        site = replay.site(event)
        if site.place and site.phase not in ("optimizer", "parameters"):
            kept = found[site.place]
            kept.steps.add(step)
            kept.num_pieces += 1
            kept.num_bytes += replay.size_bytes(event)
    return found


def _finding(replay: Replay, place: str, kept: _Kept, num_steps: int, num_lines: int) -> Finding:
    rate_bytes = kept.num_bytes // num_steps
    text = (
        f"{kept.num_pieces:,} allocations of {place}, {format_bytes(kept.num_bytes)}, were not freed, made in "
        f"{len(kept.steps):,} of {num_steps:,} steps"
    )
    evidence = [Fact(text=text, known="measured")]
    if num_lines > 1:
        evidence.append(Fact(text=f"{num_lines:,} lines leak memory in this way", known="measured"))
    return Finding(
        cause="leak",
        title=f"allocations of {place} are not freed: {format_bytes(rate_bytes)} per step",
        place=place,
        evidence=tuple(evidence),
        peak_share=min(1.0, kept.num_bytes / replay.peak_bytes),
        remedy="find the object that keeps this line's tensors (a list, an attribute, a loss with its graph); store "
        "`.detach()`, `.item()` or `.cpu()` of them instead, or delete them after the step",
        effect_bytes=kept.num_bytes,
        effect_known="counted",
    )
