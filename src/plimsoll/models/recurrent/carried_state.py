"""The state of a recurrent model, carried from one window of a stream to the next (stateful truncated BPTT).

`CarriedState` is a submodule of the model. For each stream slot of the batch it stores the detached state after the
last window. Each sample contains its stream slot and window number (`plimsoll.data.samples.streams`). The first window
of a stream starts from zeros. The training state is a buffer, which checkpoints save.

Not detected: windows in the wrong order (`plimsoll.data.batches.batching` detects them), and a stream slot that occurs
twice in a batch. Wrap the model in ``DistributedDataParallel`` with ``broadcast_buffers=False``. Otherwise every rank
would continue from the states of rank 0.

Shapes: B samples, T tokens, E embedding size, N layers, H hidden size, P parts of the state (2 for an LSTM, otherwise
1).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from plimsoll.errors import InputError

State: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""The state as ``torch.nn`` defines it: (N, B, H), or two such tensors for an LSTM."""


class CarriedState(nn.Module):
    """The states of all stream slots. Training and evaluation have separate states; only the training state is saved.

    Args:
        recurrent: the recurrent layers; the states have their sizes, device and dtype.
        num_slots: number of stream slots, which is the number of samples per batch.

    Raises:
        InputError: if ``num_slots`` is less than 1.
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
        # Even windows read the first state and write the second; odd windows do the reverse. The state that a window
        # reads is therefore not overwritten. A step that is undone and repeated, even with other micro-batches, reads
        # the same state again.
        shape = (2, num_slots, self._num_parts, recurrent.num_layers, recurrent.hidden_size)
        for name, is_kept in (("training_state", True), ("evaluation_state", False)):
            zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            self.register_buffer(name, zeros, persistent=is_kept)

    def state(self, slots_B: Tensor, windows_B: Tensor) -> State:
        """Return the state from which each of these windows starts.

        Args:
            slots_B: the stream slot of each window, from 0.
            windows_B: the number of each window in its stream; 0 starts from zeros.

        Raises:
            InputError: if there are more samples than stream slots.
        """
        if len(slots_B) > self.num_slots:  # the shape is known without a device sync
            raise InputError(
                f"a batch has {len(slots_B)} samples, and the model carries the state of {self.num_slots} stream "
                f"slots: call `model.carry({len(slots_B)})`, with the number of stream slots of the stream"
            )
        found_BPNH = self._states[windows_B % 2, slots_B]
        is_first_B = windows_B == 0
        found_BPNH = torch.where(is_first_B[:, None, None, None], torch.zeros_like(found_BPNH), found_BPNH)
        found_PNBH = found_BPNH.permute(1, 2, 0, 3).contiguous()
        return (found_PNBH[0], found_PNBH[1]) if self._num_parts == 2 else found_PNBH[0]

    @torch.no_grad()
    def put(self, slots_B: Tensor, windows_B: Tensor, state: State) -> None:
        """Store the state after these windows, from which the next windows start. The arguments are as in `state`."""
        parts = state if isinstance(state, tuple) else (state,)
        found_BPNH = torch.stack(parts).permute(2, 0, 1, 3)
        self._states[1 - windows_B % 2, slots_B] = found_BPNH.to(self._states.dtype)

    @property
    def _states(self) -> Tensor:
        return self.training_state if self.training else self.evaluation_state


def run_with_resets(
    recurrent: nn.Module, embedded_BTE: Tensor, state: State | None, resets_BT: Tensor | None
) -> tuple[Tensor, State]:
    """Run recurrent layers, and set the state to zeros before each token that ``resets_BT`` marks.

    All windows are split where any sample has a reset, and run part by part. The result is exact; more resets take more
    time.

    Args:
        recurrent: the layers.
        embedded_BTE: the inputs.
        state: the initial state; ``None`` means zeros.
        resets_BT: true for a token before which the state is reset; ``None``: no resets.

    Returns:
        The hidden states (B, T, H), and the state after the last token.
    """
    cuts: set[int] = set() if resets_BT is None else set(resets_BT.any(dim=0).nonzero().flatten().tolist())
    hidden = []
    last: Any = state  # not None after the loop
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
    # Not a product with 0, because NaN and infinity times 0 are NaN.
    return torch.where(is_reset_B[None, :, None], torch.zeros_like(part_NBH), part_NBH)
