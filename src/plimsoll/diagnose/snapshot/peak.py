"""What was live at one moment, by what it is for and by the user's line.

What it is for is assumed from names of frames: where it was allocated and, if that was recorded, where it was freed.
What autograd allocated and an optimizer freed, or nobody yet, is a gradient; what was freed by the backward pass was
saved for it. What no name tells is "unknown".
"""

from __future__ import annotations

from collections import Counter

from plimsoll.diagnose.snapshot.recording import Phase
from plimsoll.diagnose.snapshot.replay import NEVER, Piece, Replay
from plimsoll.records.diagnosis import Share

_MOST_SHARES = 12

_BY_PHASE: dict[Phase, str] = {
    "parameters": "parameters",
    "optimizer": "optimizer states",
    "backward": "gradients",
    "forward": "activations",
    "": "unknown",
}
_FREED_IN: dict[tuple[Phase, Phase], str] = {
    ("optimizer", "optimizer"): "temporaries",
    ("backward", "backward"): "temporaries",
    ("forward", "forward"): "temporaries",
    ("", "backward"): "activations",
    ("", "optimizer"): "gradients",
}


def shares_at(replay: Replay, event: int) -> tuple[Share, ...]:
    """Return what was live after an event, largest first; the smallest are one share, ``others``."""
    sizes = Counter[tuple[str, str]]()
    for piece in replay.live_at(event):
        sizes[category_of(replay, piece), piece.site.place] += piece.num_bytes
    ranked = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    shares = [
        Share(category=category, num_bytes=num_bytes, known="assumed", place=place)
        for (category, place), num_bytes in ranked[:_MOST_SHARES]
        if num_bytes
    ]
    others_bytes = sum(num_bytes for _, num_bytes in ranked[_MOST_SHARES:])
    if others_bytes:
        shares.append(Share(category="others", num_bytes=others_bytes, known="counted"))
    return tuple(shares)


def category_of(replay: Replay, piece: Piece) -> str:
    """Return what an allocation is for, as far as names tell."""
    phase = piece.site.phase
    if piece.freed != NEVER:
        return _FREED_IN.get((phase, replay.site(piece.freed).phase), _BY_PHASE[phase])
    return _BY_PHASE[phase]
