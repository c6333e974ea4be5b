"""The peak memory of an optimizer's update, as blocks that are allocated to check that they fit.

Optimizers of this package report their peak (`SeparableOptimizer`). For other optimizers, the estimate is a multiple of
the parameters' bytes, which the tests verify for all of ``torch.optim``. The estimate must not be much higher than the
real peak. An update that seems not to fit runs in chunks, whose states are allocated among existing gradients. The
resulting holes made the heap of a training run of BERT 390 MiB larger. For third-party optimizers, the same multiple is
used, although they may take more.
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
"""The most states per parameter: AMSGrad, and RMSprop with momentum and centered."""
_STATES = {
    torch.optim.SGD: 0, torch.optim.Muon: 1, torch.optim.Adagrad: 1, torch.optim.ASGD: 1, torch.optim.RMSprop: 1,
    torch.optim.Adadelta: 2, torch.optim.Adam: 2, torch.optim.AdamW: 2, torch.optim.Adamax: 2, torch.optim.NAdam: 2,
    torch.optim.RAdam: 2, torch.optim.Rprop: 2,
}  # fmt: skip
_SETTINGS_WITH_A_STATE = ("momentum", "amsgrad", "centered")
_HOLES_SHARE = 1 / 8
"""Extra share of new states for holes, because they are allocated in another order than the test blocks. The holes were
up to 4 % of 450 MiB in a model of many small and large parameters."""
SLACK_BYTES = 1 << 20
"""Growth of the heap and of Python's allocator for objects that are too small to be counted."""
_TEMPORARIES = 3
# RAdam takes six temporaries from its sixth step on. Muon orthogonalizes in bfloat16, possibly the parameters' dtype.
_MOST_TEMPORARIES = dict.fromkeys([torch.optim.RAdam, torch.optim.Muon, torch.optim.Adafactor], 6)


def most_at_once(optimizer: torch.optim.Optimizer, members: Members, created: Members) -> list[int]:
    """Return the sizes in bytes of the most blocks that an update by ``torch.optim`` holds at once on the CPU.

    Args:
        optimizer: the optimizer.
        members: the parameters to update.
        created: the parameters among them whose states the update creates.
    """
    states = blocks_of_states(optimizer, created)
    return [*blocks_of_temporaries(optimizer, members), *states, round(sum(states) * _HOLES_SHARE) + SLACK_BYTES]


def without_states(optimizer: torch.optim.Optimizer, members: Members) -> Members:
    """Return the parameters whose states do not exist yet and will be created by the next update."""
    return [
        (group, parameter)
        for group, parameter in members
        if not (_has_states(optimizer, parameter) or has_no_states(optimizer, optimizer.param_groups[group]))
    ]


def blocks_of_states(optimizer: torch.optim.Optimizer, members: Members, times: float = MOST_STATES) -> list[int]:
    """Return the maximum memory of new states, as block sizes in bytes.

    Args:
        optimizer: the optimizer.
        members: the parameters whose states will be created.
        times: the multiple of the parameters' bytes that states of an unknown optimizer may take.
    """
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
    """Return the maximum memory of an update's temporaries, as block sizes in bytes.

    The loop over parameters frees the temporaries of one parameter only after the next parameter has allocated as much,
    so two parameters count. With ``foreach``, the default on a GPU, all parameters count; ``fused`` has no temporaries.
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
    """Allocate blocks of these sizes (bytes) at the same time, then free them; raises if memory runs out."""
    [torch.empty(num_bytes, dtype=torch.uint8, device=device) for num_bytes in blocks]


def _has_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has states.

    Before torch 2.0, SGD without momentum stored a buffer of ``None``, which a checkpoint may contain.
    """
    return any(value is not None for value in optimizer.state.get(parameter, {}).values())


def _factored_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of Adafactor's states: row and column means of a matrix, a full state of a vector."""
    if parameter.dim() < 2:
        return dense_bytes(parameter)
    rows, columns = parameter.shape[-2:]
    return dense_bytes(parameter) // max(rows * columns, 1) * (rows + columns)


def _num_states(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> int:
    """Return the largest number of parameter-sized states that an optimizer of ``torch.optim`` keeps per parameter."""
    return _STATES[type(optimizer)] + sum(map(bool, map(settings.get, _SETTINGS_WITH_A_STATE)))


def _blocks(sizes: list[int], times: float) -> list[int]:
    """Return block sizes that total ``times`` the sum of ``sizes``; each is one of ``sizes``, to fit in heap holes."""
    whole = int(times)
    rest = round((times - whole) * sum(sizes))
    return sizes * whole + ([rest] if rest else [])
