"""What an optimizer's update takes of memory at most, as blocks that are allocated to see whether they are there.

Optimizers of this package say it themselves (`SeparableOptimizer`). Of others it is a multiple of the parameters'
bytes, which the tests count for all of ``torch.optim``. Does NOT know optimizers from elsewhere, which may take more:
of theirs it is the usual.
"""

from __future__ import annotations

import torch
from torch import nn

from plimsoll.optimizers import SeparableOptimizer
from plimsoll.run.sparse import bytes_updated, has_no_states

Members = list[tuple[int, nn.Parameter]]
"""Parameters, each with the index of its group."""

MOST_STATES = 3
"""AMSGrad keeps so many times the parameter, and RMSprop with momentum and centered."""
SLACK_BYTES = 1 << 20
"""What the heap and Python's own allocator grow by, for what is too small to be counted."""
_TEMPORARIES = 3
_MOST_TEMPORARIES = dict.fromkeys([torch.optim.Muon, torch.optim.Rprop], 4)


def most_at_once(optimizer: torch.optim.Optimizer, members: Members) -> list[int]:
    """Return the blocks that an update by an optimizer of ``torch.optim`` takes at most, on the CPU.

    Its loop goes from parameter to parameter, and gives back what one took when the next has as much: there are the
    temporaries of two. With ``foreach`` there are those of all.
    """
    sizes = [parameter.nbytes for _, parameter in members]
    has_all_at_once = any(group.get("foreach") for group in optimizer.param_groups)
    temporaries = _blocks(sizes if has_all_at_once else sorted(sizes)[-2:], _times(optimizer))
    states = blocks_of_states(optimizer, without_states(optimizer, members), MOST_STATES)
    return [*temporaries, *states, SLACK_BYTES]


def without_states(optimizer: torch.optim.Optimizer, members: Members) -> list[nn.Parameter]:
    """Return the parameters whose states the next update will create."""
    return [
        parameter
        for group, parameter in members
        if not (optimizer.state.get(parameter) or has_no_states(optimizer, optimizer.param_groups[group]))
    ]


def blocks_of_states(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], times: float) -> list[int]:
    """Return what new states take: ``times`` the parameters' bytes, unless the optimizer knows."""
    if isinstance(optimizer, SeparableOptimizer):
        return [optimizer.state_bytes_of(parameter) for parameter in parameters]
    return _blocks([parameter.nbytes for parameter in parameters], times)


def blocks_of_temporaries(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[int]:
    """Return what an update of these parameters takes and gives back."""
    if isinstance(optimizer, SeparableOptimizer):
        return [max(optimizer.temporary_bytes_of(parameter) for parameter in parameters)]
    return _blocks([bytes_updated(parameter) for parameter in parameters], _times(optimizer))


def prove_room(blocks: list[int], device: torch.device) -> None:
    """Allocate blocks of so many bytes together and free them: raises where they are not to be had."""
    [torch.empty(num_bytes, dtype=torch.uint8, device=device) for num_bytes in blocks]


def _times(optimizer: torch.optim.Optimizer) -> int:
    return _MOST_TEMPORARIES.get(type(optimizer), _TEMPORARIES)


def _blocks(sizes: list[int], times: float) -> list[int]:
    """Blocks of ``times`` as many bytes as ``sizes`` together, as large as they are: holes may be too small for one."""
    whole = int(times)
    rest = round((times - whole) * sum(sizes))
    return sizes * whole + ([rest] if rest else [])
