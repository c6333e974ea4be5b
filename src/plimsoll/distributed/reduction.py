"""Sum of gradients over all ranks, after each rank has finished its part of the batch.

Gradients are reduced in one pass, when they are complete. Small gradients are copied into a bucket that is allocated
before the first step; large gradients are reduced in place. All memory that the reduction needs is allocated before the
ranks agree to start the reduction. This includes zero gradients for parameters that only other ranks have used. No rank
can therefore wait in a collective that another rank did not reach.

The sum is bitwise equal on all ranks, but is added in another order than in a single process. The exchange does not
overlap with backward, because it must not start before all ranks have completed backward. Does not cover sparse
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import InputError
from plimsoll.records.run import OomEvent

BUCKET_BYTES = 4 << 20
_EXCHANGE_BYTES = 8 << 20  # gloo's ring allocates up to three segments of 1 MiB, plus socket buffers


class Reduction:
    """Sum of the gradients of some parameters over the ranks.

    Args:
        ranks: the ranks.
        parameters: the parameters of the model and the optimizer. Sharded parameters are skipped, because the sharding
            technique reduces their gradients.
    """

    def __init__(self, ranks: Ranks, parameters: Iterable[nn.Parameter]) -> None:
        self._ranks = ranks
        self._parameters = [one for one in dict.fromkeys(parameters) if one.requires_grad and not _is_sharded(one)]
        self._numbers = torch.zeros(len(self._parameters) + 1, dtype=torch.float64)
        self._buckets: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._lacking: list[nn.Parameter] = []

    def add_up_all(
        self, loss: float, collectively: Callable[[Callable[[], None]], OomEvent | None]
    ) -> float | OomEvent:
        """Sum loss and gradients over all ranks, and return the sum of the losses.

        ``collectively`` calls a function that may run out of memory, and returns an event on all ranks if memory runs
        out on any rank. This event is then the result instead of the loss.
        """
        loss = self.add_up_loss(loss)
        if self.has_gaps and (event := collectively(self.fill)) is not None:
            return event
        self.add_up()
        return loss

    def prepare(self) -> None:
        """Allocate memory for the exchange. Memory may run out here, before anything is exchanged.

        Raises:
            InputError: if a gradient is sparse.
        """
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise InputError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse and cannot be summed "
                    f"over {self._ranks.world_size} ranks: leave out sparse=True, or train with one rank"
                )
            self._bucket_for(parameter)
        torch.empty(_EXCHANGE_BYTES, dtype=torch.uint8)

    def add_up_loss(self, loss: float) -> float:
        """Return the sum of the losses of all ranks, and find parameters that have a gradient on some ranks only."""
        numbers = self._numbers.zero_()
        numbers[0] = loss
        for place, parameter in enumerate(self._parameters, start=1):
            numbers[place] = parameter.grad is not None
        total: float
        total, *have = self._ranks.add_up(numbers).tolist()
        self._lacking = [
            one for one, number in zip(self._parameters, have, strict=True) if 0 < number < self._ranks.world_size
        ]
        return total

    @property
    def has_gaps(self) -> bool:
        """True if some rank lacks a gradient that another rank has, so that `fill` must be called before `add_up`.

        The value is equal on all ranks.
        """
        return bool(self._lacking)

    def fill(self) -> None:
        """Allocate zero gradients for parameters that have a gradient only on other ranks. Memory may run out here."""
        for parameter in self._lacking:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the gradients over the ranks, in place."""
        waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            key, bucket = self._bucket_for(parameter)
            if gradient.is_contiguous() and gradient.numel() >= len(bucket):
                self._ranks.reduce(gradient)
                continue
            gathered = waiting.setdefault(key, [])
            if gathered and sum(map(Tensor.numel, gathered)) + gradient.numel() > len(bucket):
                self._flush(bucket, gathered)
            gathered.append(gradient)
        for key, gathered in waiting.items():
            self._flush(self._buckets[key], gathered)

    def _flush(self, bucket: Tensor, gathered: list[Tensor]) -> None:
        """Sum ``gathered`` gradients over the ranks by copying them into ``bucket`` and back.

        If the only gradient is larger than the bucket, it is reduced in slices.
        """
        flat = [gradient.reshape(-1) if gradient.is_contiguous() else gradient for gradient in gathered]
        gathered.clear()
        if len(flat) == 1 and flat[0].numel() > len(bucket):
            self._flush_in_parts(bucket, flat[0])
            return
        sizes = [gradient.numel() for gradient in flat]
        parts = torch.split(bucket[: sum(sizes)], sizes)
        for part, gradient in zip(parts, flat, strict=True):
            part.view(gradient.shape).copy_(gradient)
        self._ranks.reduce(bucket[: sum(sizes)])
        for part, gradient in zip(parts, flat, strict=True):
            gradient.copy_(part.view(gradient.shape))

    def _flush_in_parts(self, bucket: Tensor, gradient: Tensor) -> None:
        """Sum a large non-contiguous gradient over the ranks, in slices of its first dimension."""
        if gradient.ndim > 1 and gradient[0].numel() > len(bucket):
            for row in gradient:
                self._flush_in_parts(bucket, row)
            return
        num_rows = max(len(bucket) // max(gradient[0].numel(), 1), 1)
        for start in range(0, len(gradient), num_rows):
            self._flush(bucket, [gradient[start : start + num_rows]])

    def _bucket_for(self, parameter: nn.Parameter) -> tuple[tuple[torch.dtype, torch.device], Tensor]:
        key = parameter.dtype, parameter.device
        if key not in self._buckets:
            alike = sum(one.numel() for one in self._parameters if (one.dtype, one.device) == key)
            num_elements = min(BUCKET_BYTES // parameter.element_size(), alike)
            self._buckets[key] = torch.empty(num_elements, dtype=key[0], device=key[1])
        return key, self._buckets[key]


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a shard (`torch.distributed.tensor.DTensor`)."""
    return hasattr(parameter, "is_part") or type(parameter.data).__name__ == "DTensor"
