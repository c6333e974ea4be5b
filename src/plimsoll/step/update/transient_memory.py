"""What an optimizer's update takes of memory at most, as blocks that are allocated to see whether they are there.

Optimizers of this package say it themselves (`SeparableOptimizer`). Of others it is a multiple of the parameters'
bytes, which the tests count for all of ``torch.optim``. It must not be much more than is taken: an update that seems
not to fit is done in chunks, whose states come among gradients that are still there, and holes of that kind made the
heap of a BERT 390 MiB larger. Does NOT know optimizers from elsewhere, which may take more: for them the usual multiple
is taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plimsoll.models.optimizers import SeparableOptimizer
from plimsoll.step.update.sparse import bytes_updated, dense_bytes, has_no_states

Members = list[tuple[int, nn.Parameter]]
"""Parameters, each with the index of its group."""

MOST_STATES = 3
"""AMSGrad keeps so many times the parameter, and RMSprop with momentum and centered."""
_STATES = {
    torch.optim.SGD: 0, torch.optim.Muon: 1, torch.optim.Adagrad: 1, torch.optim.ASGD: 1, torch.optim.RMSprop: 1,
    torch.optim.Adadelta: 2, torch.optim.Adam: 2, torch.optim.AdamW: 2, torch.optim.Adamax: 2, torch.optim.NAdam: 2,
    torch.optim.RAdam: 2, torch.optim.Rprop: 2,
}  # fmt: skip
_SETTINGS_WITH_A_STATE = ("momentum", "amsgrad", "centered")
_HOLES_SHARE = 1 / 8
"""Of new states. They come in another order than their memory is tried in, so that holes are left between: up to 4 %
of 450 MiB in a model of many small and large parameters."""
SLACK_BYTES = 1 << 20
"""What the heap and Python's own allocator grow by, for what is too small to be counted."""
_TEMPORARIES = 3
# RAdam takes six from its sixth step on; Muon orthogonalizes in bfloat16, in which parameters may be as well.
_MOST_TEMPORARIES = dict.fromkeys([torch.optim.RAdam, torch.optim.Muon, torch.optim.Adafactor], 6)


def most_at_once(optimizer: torch.optim.Optimizer, members: Members, created: Members) -> list[int]:
    """Return the blocks that an update by an optimizer of ``torch.optim`` takes at most, on the CPU.

    ``created`` are the members that have no states yet.
    """
    states = blocks_of_states(optimizer, created)
    return [*blocks_of_temporaries(optimizer, members), *states, round(sum(states) * _HOLES_SHARE) + SLACK_BYTES]


def without_states(optimizer: torch.optim.Optimizer, members: Members) -> Members:
    """Return those whose states the next update will create."""
    return [
        (group, parameter)
        for group, parameter in members
        if not (_has_states(optimizer, parameter) or has_no_states(optimizer, optimizer.param_groups[group]))
    ]


def blocks_of_states(optimizer: torch.optim.Optimizer, members: Members, times: float = MOST_STATES) -> list[int]:
    """Return what new states take at most: ``times`` the parameters' bytes, unless it is known of the optimizer."""
    if isinstance(optimizer, SeparableOptimizer):
        return [optimizer.state_bytes_of(parameter) for _, parameter in members]
    if type(optimizer) is torch.optim.Adafactor:
        return [_factored_bytes(parameter) for _, parameter in members]
    if type(optimizer) not in _STATES:
        return _blocks([dense_bytes(parameter) for _, parameter in members], times)
    return [
        dense_bytes(parameter)
        for group, parameter in members
        for _ in range(_num_states(optimizer, optimizer.param_groups[group]))
    ]


def blocks_of_temporaries(optimizer: torch.optim.Optimizer, members: Members) -> list[int]:
    """Return what an update takes and gives back, at most.

    The loop goes from parameter to parameter, and gives back what one took when the next has as much: there are the
    temporaries of two. With ``foreach``, the usual on a GPU, there are those of all, and ``fused`` has none.
    """
    if isinstance(optimizer, SeparableOptimizer):
        return [max((optimizer.temporary_bytes_of(parameter) for _, parameter in members), default=0)]
    at_once: list[int] = []
    in_turn: list[int] = []
    for group, parameter in members:
        settings = optimizer.param_groups[group]
        if settings.get("foreach") or not (parameter.is_cpu or settings.get("fused")):
            at_once.append(bytes_updated(parameter))
        elif not settings.get("fused"):
            in_turn.append(bytes_updated(parameter))
    return (at_once + sorted(in_turn)[-2:]) * _MOST_TEMPORARIES.get(type(optimizer), _TEMPORARIES)


def prove_room(blocks: list[int], device: torch.device) -> None:
    """Allocate blocks of so many bytes at the same time and free them: raises where they do not fit."""
    [torch.empty(num_bytes, dtype=torch.uint8, device=device) for num_bytes in blocks]


def _has_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    """SGD wrote a buffer of None where there was no momentum, before torch 2.0, and a checkpoint may have that."""
    return any(value is not None for value in optimizer.state.get(parameter, {}).values())


def _factored_bytes(parameter: nn.Parameter) -> int:
    """What Adafactor keeps: of matrices the mean of each row and column, of vectors a state as large."""
    if parameter.dim() < 2:
        return dense_bytes(parameter)
    rows, columns = parameter.shape[-2:]
    return dense_bytes(parameter) // max(rows * columns, 1) * (rows + columns)


def _num_states(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> int:
    """How many states as large as a parameter an optimizer of ``torch.optim`` keeps of it, at most."""
    return _STATES[type(optimizer)] + sum(map(bool, map(settings.get, _SETTINGS_WITH_A_STATE)))


def _blocks(sizes: list[int], times: float) -> list[int]:
    """Blocks of ``times`` the sum of ``sizes``, each as large as one of them: holes may be too small for one."""
    whole = int(times)
    rest = round((times - whole) * sum(sizes))
    return sizes * whole + ([rest] if rest else [])
