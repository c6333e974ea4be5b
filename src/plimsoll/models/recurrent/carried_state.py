"""The state of a recurrent model, carried from one window of a stream to the next: stateful, truncated BPTT.

`CarriedState` is a part of the model and keeps, for each stream slot of the batch, the state after the window that was
read last, detached. Each sample says its stream slot and the number of its window (`plimsoll.data.samples.streams`);
the first window of a stream slot begins from zeros. The state of training is a buffer, which checkpoints keep.

It does NOT notice windows that come in another order than that of the stream (`plimsoll.data.batches.batching` does),
or a stream slot that is in a batch twice. Whoever wraps the model in ``DistributedDataParallel`` must say
``broadcast_buffers=False``: each process carries the stream slots it reads, and all would go on from those of the
first.

Shapes: B samples, T tokens, E embedding size, N layers, H hidden size, P parts of the state (an LSTM has 2, others 1).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from plimsoll.errors import InputError

State: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""As ``torch.nn`` has it: (N, B, H), of an LSTM two of them."""


class CarriedState(nn.Module):
    """The state of each stream slot; in training mode that of training, else that of evaluation, which is not saved.

    Args:
        recurrent: the layers whose state it is; on their device, in their dtype.
        num_slots: the samples of a batch.

    Raises:
        InputError: if there are no stream slots.
    """

    training_state: Tensor
    evaluation_state: Tensor

    def __init__(self, recurrent: nn.RNNBase, num_slots: int) -> None:
        super().__init__()
        if num_slots < 1:
            raise InputError(
                f"cannot carry the state of {num_slots} stream slots: give the samples of a batch, at least 1"
            )
        weight = next(recurrent.parameters())
        self.num_slots = num_slots
        self._num_parts = 2 if isinstance(recurrent, nn.LSTM) else 1
        # A window with an even number reads one state and writes the other, one with an odd number the reverse. So what
        # a window reads is still there after it: a step that is undone and done again, also in other micro-batches,
        # reads the same.
        shape = (2, num_slots, self._num_parts, recurrent.num_layers, recurrent.hidden_size)
        for name, is_kept in (("training_state", True), ("evaluation_state", False)):
            zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            self.register_buffer(name, zeros, persistent=is_kept)

    def state(self, slots_B: Tensor, windows_B: Tensor) -> State:
        """Return the state to begin some windows with."""
        if len(slots_B) > self.num_slots:  # known without reading the device
            raise InputError(
                f"a batch has {len(slots_B)} samples, and the model carries the state of {self.num_slots} stream "
                f"slots: call `model.carry({len(slots_B)})`, with as many stream slots as the stream has"
            )
        found_BPNH = self._states[windows_B % 2, slots_B]
        is_first_B = windows_B == 0
        found_BPNH = torch.where(is_first_B[:, None, None, None], torch.zeros_like(found_BPNH), found_BPNH)
        found_PNBH = found_BPNH.permute(1, 2, 0, 3).contiguous()
        return (found_PNBH[0], found_PNBH[1]) if self._num_parts == 2 else found_PNBH[0]

    @torch.no_grad()
    def put(self, slots_B: Tensor, windows_B: Tensor, state: State) -> None:
        """Keep the state after some windows, for those that come next."""
        parts = state if isinstance(state, tuple) else (state,)
        found_BPNH = torch.stack(parts).permute(2, 0, 1, 3)
        self._states[1 - windows_B % 2, slots_B] = found_BPNH.to(self._states.dtype)

    @property
    def _states(self) -> Tensor:
        return self.training_state if self.training else self.evaluation_state


def run_with_resets(
    recurrent: nn.Module, embedded_BTE: Tensor, state: State | None, resets_BT: Tensor | None
) -> tuple[Tensor, State]:
    """Run recurrent layers from a state, ``None`` for zeros, and set it to zeros before each token of ``resets``.

    The windows are cut wherever one of the samples has a reset, and run part by part: exact, and slower the more resets
    there are.

    Returns:
        the hidden states (B, T, H), and the state after the last token.
    """
    cuts: set[int] = set() if resets_BT is None else set(resets_BT.any(dim=0).nonzero().flatten().tolist())
    hidden = []
    last: Any = state  # after the last part there is one
    for begin, end in pairwise(sorted({0, *cuts, embedded_BTE.shape[1]})):
        if resets_BT is not None and last is not None and begin in cuts:
            last = _reset(last, resets_BT[:, begin])
        hidden_BTH, last = recurrent(embedded_BTE[:, begin:end], last)
        hidden.append(hidden_BTH)
    return (hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1)), last


def _reset(state: State, is_reset_B: Tensor) -> State:
    if isinstance(state, tuple):
        return _zeroed(state[0], is_reset_B), _zeroed(state[1], is_reset_B)
    return _zeroed(state, is_reset_B)


def _zeroed(part_NBH: Tensor, is_reset_B: Tensor) -> Tensor:
    # Not multiplied by 0: what is not finite would stay so.
    return torch.where(is_reset_B[None, :, None], torch.zeros_like(part_NBH), part_NBH)
